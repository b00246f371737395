"""The objective of a trial: the measured speedup over plain decoding, paired prompt by prompt.

All facts about a trial are stored in its user attributes, so that the study alone is enough to rebuild its records. A trial
that runs out of memory, or that the engine cannot run, is a result, with a reason and a violated constraint. Any other error
is a defect and is raised.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import optuna

from layerskip import Measurement, PromptSet, SpeculativeConfig, UnsupportedModel
from layerskip.device.memory import is_out_of_memory, release_memory, within_memory
from layerskip.measure.measurement import check_output, pair_speedup
from searches.app.checks import check_number, check_whole
from searches.app.interrupt import defer_interrupt
from searches.backends.backend import CANDIDATE, BackendError
from searches.backends.running_engine import request_metrics
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, ModelBench, Row, drifted_rows
from searches.study.leaderboard import Leaderboard, LeaderboardEntry, drafters, leaderboard
from searches.study.pruning import BoundEstimator
from searches.tracking.names import DRIFTED, ENGINE_FAILED, ENGINE_LOG, METRICS, PREDICTED

MEASURING_SECONDS = "measuring_seconds"
"""User attribute: a trial's seconds of decoding, without those of fitting, timing and prediction."""
OVERHEAD_SECONDS = "between_seconds"
"""User attribute: seconds of Optuna, MLflow and Hydra between a trial and the one before."""
OUT_OF_MEMORY = "out of memory"
Refusal = Callable[[optuna.Trial, SpeculativeConfig], None]

_SEED_STEP = 10_000_019  # between the seeds of two trials, each of which counts up prompt by prompt
_KNOWN = "measured often enough"
_REPLICATES = 2  # whole measurements, or failures, of a configuration that does not lead; samplers repeat configurations
_LEVEL = 0.02  # share by which a trial may be slower than the leader and still be level with it
_PRUNING_CONFIDENCE = 0.9  # at which a trial is slower than the leader


class OutputChanged(RuntimeError):
    """A float32 output that drafting changed: a defect of the decoder, never a property of a configuration."""


@dataclass(frozen=True)
class MeasureSettings:
    """Settings of measuring trials and finals.

    Args:
        max_new_tokens: new tokens per prompt and turn.
        prompts: tune prompts per trial, taken from the categories in turn; None takes all.
        survivor_prompts: tune prompts of a trial that is level with the leader; None takes all.
        repeats: how often a trial decodes each of them.
        drift: tolerated share by which the speed of the machine may change. A prompt of a trial is measured again if it
            differs by more from what the other prompts predict.
        held_out_prompts: held-out prompts of the finals; None takes all.
        held_out_repeats: highest number of times that the finals decode each of them.
        finalists: configurations that are measured on held-out prompts: the best with each set of drafters, and others. The
            first with the leader's drafters is added.
        warmup: other tune prompts that learning drafters decode before each trial, unmeasured.
        indifference: the finals end once no finalist can be more than this share faster than the leader; None: no such end.
    """

    max_new_tokens: int = 48
    prompts: int | None = 6
    survivor_prompts: int | None = 9
    repeats: int = 1
    drift: float = 0.3
    held_out_prompts: int | None = None
    held_out_repeats: int = 1
    finalists: int = 5
    warmup: int = 6
    indifference: float | None = None

    def __post_init__(self) -> None:
        check_number("measure.drift", self.drift)
        if self.indifference is not None:
            check_number("measure.indifference", self.indifference)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("drift", "indifference") and (value is not None or not field.name.endswith("prompts")):
                check_whole(f"measure.{field.name}", value, 0 if field.name == "warmup" else 1)


class Objective:
    """Objective that measures the configuration that a trial suggests, on tune prompts from the ``first_prompt``-th on.

    ``bounds`` bounds suggestions, so that those that cannot win are pruned; None decodes all.
    """

    def __init__(
        self,
        bench: ModelBench,
        space: SearchSpace,
        prompts: PromptSet,
        settings: MeasureSettings,
        seed: int,
        on_prompt: Callable[[], None] = lambda: None,
        bounds: BoundEstimator | None = None,
        first_prompt: int = 0,
    ) -> None:
        self.bench, self.space, self.bounds = bench, space, bounds
        self.settings, self.seed, self.on_prompt = settings, seed, on_prompt
        # Rows of configurations that were measured together, in place of the measurement of their first trial.
        self.compared: dict[SpeculativeConfig, list[Row]] = {}
        self.first = prompts.take(settings.prompts, first_prompt)  # what every trial decodes
        self._first_ids = frozenset(item.id for item in self.first)
        survivors = prompts.take(settings.survivor_prompts, first_prompt)
        self.further = tuple(item for item in survivors if item.id not in self._first_ids)  # trials level with the leader
        others = [item for item in prompts.take(None) if item not in (*self.first, *self.further)]
        self.warmup = PromptSet(tuple(others[: settings.warmup]))  # what drafters that learn decode before, unmeasured

    def __call__(self, trial: optuna.Trial, refuse: Refusal = lambda *_: None) -> float:
        """Measure a trial that ``refuse`` does not end by an error, report its speedup prompt by prompt, and return it.

        Raises:
            optuna.TrialPruned: it cannot win, is slower than the leader, ran out of memory, or the engine could not run it;
                see its attribute ``reason``.
            BackendError: the engine has run no trial so far.
            OutputChanged, PromptError: a float32 output differs from the baseline's; every output ends with its first token.
        """
        start = time.monotonic()
        config = self.space.suggest(trial)
        trial.set_user_attr("config", config.to_dict())
        refuse(trial, config)
        board = leaderboard(trial.study)
        known = board.entries.get(config, LeaderboardEntry(config))
        race = _Race(self, trial, config, board)
        reason = self._known_outcome(trial, known, board) or self._measure(race)
        measurement = Measurement.of(race.rows, BASELINE, CANDIDATE)
        if not reason:
            check_output(measurement.baseline)
        table = measurement.table()
        self._record(race, measurement, table, reason, time.monotonic() - start)
        if reason not in ("", _KNOWN):
            raise optuna.TrialPruned(reason)
        pooled = LeaderboardEntry(config, seconds=dict(known.seconds))
        pooled.add(table)
        return pooled.speedup_on(self._first_ids)

    def _known_outcome(self, trial: optuna.Trial, known: LeaderboardEntry, board: Leaderboard) -> str:
        if over := self.space.over_memory(known.config.plans(self.space.layers)):
            return f"{OUT_OF_MEMORY}: {over}"
        if known.failures >= _REPLICATES:
            return f"{ENGINE_FAILED} {_REPLICATES} times before"
        leads = board.leader is not None and board.leader.config == known.config  # which is measured again and again
        enough = _REPLICATES if known.config.method != "none" else 1  # every other trial measures plain decoding, too
        if known.complete >= enough and not leads:
            return _KNOWN
        bounds = self.bounds
        if bounds is None or known.seconds:
            return ""
        bound = within_memory(lambda: bounds.estimate(trial.study, known.config))
        if bound is None:
            return ""
        if bound.predicted is not None:
            trial.set_user_attr(PREDICTED, bound.predicted)
        return bound.reason

    def _measure(self, race: _Race) -> str:
        trial, begun = race.trial, time.monotonic()
        if (compared := self.compared.pop(race.config, None)) is not None:  # measured, and timed, with others
            race.rows += compared
            for number, row in enumerate(compared):
                trial.report(pair_speedup(row[BASELINE], row[CANDIDATE]), number)
            if metrics := request_metrics(Measurement.of(compared, BASELINE, CANDIDATE)):
                trial.set_user_attr(METRICS, metrics)
            return ""
        try:
            reason = race.run()
        except BackendError as error:
            if len(race.board.trials) == race.board.failures >= _REPLICATES:
                raise  # it can run nothing
            reason = f"{ENGINE_FAILED}: {error.reason}"
            trial.set_user_attr(ENGINE_LOG, error.log_tail)
        except UnsupportedModel as error:  # another worker, which chose the methods, may have what is missing here
            reason = f"{ENGINE_FAILED}: {error}"
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = OUT_OF_MEMORY
        if reason == OUT_OF_MEMORY:
            release_memory()  # only here: the handled error refers to the memory
        trial.set_user_attr(MEASURING_SECONDS, time.monotonic() - begun)
        return reason

    @defer_interrupt()
    def _record(self, race: _Race, measurement: Measurement, table: dict[str, Any], reason: str, seconds: float) -> None:
        """Store a trial's results; raise :class:`OutputChanged` if a float32 output differs from the baseline's."""
        trial = race.trial
        trial.set_user_attr("seconds", seconds)
        if reason:
            trial.set_user_attr("reason", reason)
        changed = False
        if measurement.candidate:
            metrics = measurement.to_dict()
            changed = metrics["losslessness"]["verdict"] == "different"
            trial.set_user_attr("measurement", metrics)
            trial.set_user_attr("table", table)
            if changed and self.bench.exact:
                raise OutputChanged(f"trial {trial.number} changed a float32 output: {measurement.lossless}")
        # Last, because a constraint cannot be overwritten.
        trial.set_constraint("out_of_memory", float(reason.startswith((OUT_OF_MEMORY, ENGINE_FAILED))))
        trial.set_constraint("output_changed", float(changed))


class _Race:
    """The measurement of one trial, prompt by prompt, against plain decoding and the leader so far.

    The leaderboard may change meanwhile, by trials of other workers. ``rows`` are the samples so far.
    """

    def __init__(self, objective: Objective, trial: optuna.Trial, config: SpeculativeConfig, board: Leaderboard) -> None:
        self.trial, self.config, self.board = trial, config, board
        self.rows: list[Row] = []
        self._objective = objective
        self._remeasured: set[int] = set()  # places of rows
        # No two trials share a seed, else replicates would repeat the same draws.
        self._seed = objective.seed + _SEED_STEP * (trial.number + 1)

    def run(self) -> str:
        """Measure a few prompts first, and more of them if the trial is level with the leader; return why it ended early."""
        objective = self._objective
        more = objective.further if self.config.method != "none" else ()  # every other trial measures plain decoding, too
        items, few, repeats = (*objective.first.items, *more), len(objective.first.items), objective.settings.repeats
        prompts, decodings = PromptSet(items), repeats * len(items)
        # One comparison for all prompts, as some drafters learn from prompt to prompt.
        for row in self._compare(prompts, repeats, self._seed, objective.warmup):
            # The pruner compares trials at the same step.
            self.trial.report(pair_speedup(row[BASELINE], row[CANDIDATE]), len(self.rows))
            self.rows.append(row)
            objective.on_prompt()
            is_last, is_first_look = len(self.rows) == decodings, len(self.rows) == few
            is_look = is_last or is_first_look
            # The pruner comes last, because it reads the database.
            slower = not is_look and len(self.rows) > 1 and self._is_slower() and self.trial.should_prune()
            if slower or is_look:
                measured = Measurement.of(self.rows, BASELINE, CANDIDATE)
                if metrics := request_metrics(measured) | objective.bench.metrics():
                    self.trial.set_user_attr(METRICS, metrics)
                self._remeasure_drifted(prompts)
            if is_first_look:
                if more and not self._is_level():
                    break
            elif slower and self._is_slower():
                return "slower than the best so far"
        return ""

    def _compare(self, prompts: PromptSet, repeats: int, seed: int, before: PromptSet) -> Iterator[Row]:
        return self._objective.bench.compare({CANDIDATE: self.config}, prompts, repeats, seed, (), before)

    def _is_level(self) -> bool:
        """Return whether a trial is about as fast as plain decoding and as the leader, on the prompts that both decoded."""
        own = LeaderboardEntry(self.config)
        own.add(Measurement.of(self.rows, BASELINE, CANDIDATE).table())
        leader = self.board.leader or LeaderboardEntry(self.config)
        common = own.seconds.keys() & leader.seconds.keys() or own.seconds.keys()
        return own.speedup_on(common) >= (1 - _LEVEL) * max(1.0, leader.speedup_on(common))

    def _is_slower(self) -> bool:
        """Return whether a trial is significantly slower than plain decoding or than the leader.

        The pruner compares on how many prompts the leader is ahead, not by how much. A lookup that is far ahead on few
        prompts may still be faster over all. A configuration with drafters that no trial has measured to the end decodes
        the prompts of every trial, so that the finals may take it.
        """
        if Measurement.of(self.rows, BASELINE, CANDIDATE).interval(confidence=_PRUNING_CONFIDENCE)[1] < 1.0:
            return True
        leader = self.board.leader
        if leader is None or leader.config == self.config:
            return False
        complete = (drafters(entry.config) for entry in self.board.ranking)
        if len(self.rows) < len(self._objective.first.items) and drafters(self.config) not in complete:
            return False
        against_leader = []
        for row in self.rows:
            own, plain, _ = leader.seconds.get(row[BASELINE].prompt_id, (0.0, 0.0, 0))
            if own and plain:
                seconds = row[BASELINE].decode_seconds * own / plain  # at the machine's present speed
                against_leader.append({**row, BASELINE: dataclasses.replace(row[BASELINE], decode_seconds=seconds)})
        measured = Measurement.of(against_leader, BASELINE, CANDIDATE)
        return bool(against_leader) and measured.interval(confidence=_PRUNING_CONFIDENCE)[1] < 1.0

    def _remeasure_drifted(self, prompts: PromptSet) -> None:
        """Measure rows with drift again, each once. Drafters that learn first decode as many prompts as before any trial."""
        trial, objective, settings = self.trial, self._objective, self._objective.settings
        for place, drifted in enumerate(drifted_rows(self.rows, settings.drift)):
            if drifted and place not in self._remeasured:
                self._remeasured.add(place)
                trial.set_user_attr(DRIFTED, trial.user_attrs.get(DRIFTED, 0) + 1)
                number = place % len(prompts)
                earlier = PromptSet((*objective.warmup, *prompts.items[:number])[-settings.warmup or None :])
                (self.rows[place],) = self._compare(PromptSet((prompts.items[number],)), 1, self._seed + place, earlier)
