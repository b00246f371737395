"""The objective of a trial: the measured speedup over plain decoding, paired prompt by prompt.

All facts about a trial are stored in its user attributes, so that the study alone is enough to rebuild its records. A trial
that runs out of memory, or that the engine cannot run, is a result, with a reason and a violated constraint. Any other error
is a defect and is raised.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna

from layerskip import Measurement, PromptSet, SpeculativeConfig
from layerskip.device.memory import is_out_of_memory, release_memory
from layerskip.measure.measurement import Sample, check_output, pair_speedup
from searches.app.checks import check_number, check_whole
from searches.app.interrupt import defer_interrupt
from searches.app.memory import within_memory
from searches.backends.backend import CANDIDATE, BackendError
from searches.backends.figures import sample_figures
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, Bench, Row
from searches.study.drift import drifted_rows, drifted_since
from searches.study.leaderboard import FINISHED, LeaderboardEntry, configuration, leaderboard, ranking
from searches.study.pruning import BoundEstimator, SpeedupBound
from searches.tracking.names import DRIFTED, ENGINE_FAILED, ENGINE_LOG, FIGURES, PREDICTED

MEASURING_SECONDS = "measuring_seconds"
"""User attribute: a trial's seconds of decoding, without those of fitting, timing and prediction."""
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
        survivor_repeats: further repeats of a trial that is still level.
        drift: tolerated share by which the speed of the machine may change. A prompt is measured again if it differs by more
            from what the other prompts predict. All prompts of a trial are measured again if plain decoding differs by more
            from earlier trials.
        held_out_prompts: held-out prompts of the finals; None takes all.
        held_out_repeats: highest number of times that the finals decode each of them.
        finalists: configurations that are measured on held-out prompts; the best with other drafters and the first
            with the leader's drafter are added.
        warming: other tune prompts that drafters decode before each trial, unmeasured, if they learn from prompt to prompt.
        indifference: the finals end once no finalist can be more than this share faster than the leader; None measures to
            the end.
    """

    max_new_tokens: int = 48
    prompts: int | None = 6
    survivor_prompts: int | None = 9
    repeats: int = 1
    survivor_repeats: int = 1
    drift: float = 0.3
    held_out_prompts: int | None = None
    held_out_repeats: int = 1
    finalists: int = 5
    warming: int = 6
    indifference: float | None = None

    def __post_init__(self) -> None:
        check_number("measure.drift", self.drift)
        if self.indifference is not None:
            check_number("measure.indifference", self.indifference)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("drift", "indifference") and (value is not None or not field.name.endswith("prompts")):
                check_whole(f"measure.{field.name}", value, 0 if field.name in ("survivor_repeats", "warming") else 1)


class Objective:
    """Objective that measures the configuration that a trial suggests.

    Args:
        bench: measures it.
        space: the search space.
        prompts: tune prompts.
        settings: of measuring.
        seed: of the study.
        on_prompt: called after each prompt.
        bounds: bounds suggestions, so that those that cannot win are pruned; None decodes all.
        first_prompt: place of the first tune prompt of trials.

    Attributes:
        first: the prompts that every trial decodes.
        warming: prompts that drafters which learn decode before, unmeasured.
        compared: rows of configurations that were measured together, in place of the measurement of their first trial.
    """

    def __init__(
        self,
        bench: Bench,
        space: SearchSpace,
        prompts: PromptSet,
        settings: MeasureSettings,
        seed: int,
        on_prompt: Callable[[], None] = lambda: None,
        bounds: BoundEstimator | None = None,
        first_prompt: int = 0,
    ) -> None:
        self.bounds = bounds
        self.compared: dict[SpeculativeConfig, list[Row]] = {}
        self.bench, self.space, self.prompts = bench, space, prompts
        self.settings, self.seed, self.on_prompt = settings, seed, on_prompt
        self.first = prompts.take(settings.prompts, first_prompt)
        self._survivors = prompts.take(settings.survivor_prompts, first_prompt)
        self._first_ids = frozenset(item.id for item in self.first)
        measured = self._first_ids.union(item.id for item in self._survivors)
        others = [item for item in prompts.take(None) if item.id not in measured]
        self.warming = PromptSet(tuple(others[: settings.warming]))

    def __call__(self, trial: optuna.Trial, refuse: Refusal = lambda *_: None) -> float:
        """Measure a trial that ``refuse`` does not end by an error, report its speedup prompt by prompt, and return it.

        Raises:
            optuna.TrialPruned: it cannot win, is slower than the leader, ran out of memory, or the engine could not run it;
                see its attribute ``reason``.
            BackendError: the engine has run no trial so far.
            OutputChanged, PromptError: a float32 output differs from the baseline's; every output ends with its first token.
        """
        start = time.monotonic()  # the space fits bridges of a suggestion, unless they exist
        config = self.space.suggest(trial)
        trial.set_user_attr("config", config.to_dict())
        refuse(trial, config)
        rows: list[dict[str, Sample]] = []
        not_run = Measurement((), ())
        before = trial.study.get_trials(deepcopy=False, states=FINISHED)
        known = leaderboard(before).get(config)
        failed = [other for other in before if str(other.user_attrs.get("reason")).startswith(ENGINE_FAILED)]
        if sum(configuration(other) == config for other in failed) >= _REPLICATES:
            often = f"{ENGINE_FAILED} {_REPLICATES} times before"
            self._record(trial, config, not_run, often, time.monotonic() - start)
            raise optuna.TrialPruned(often)
        enough = _REPLICATES if config.kind != "none" else 1  # every other trial measures plain decoding, too
        leads = any(leader.config == config for leader in ranking(trial.study)[:1])  # the leader is measured again and again
        if known is not None and known.complete >= enough and not leads:
            self._record(trial, config, not_run, _KNOWN, time.monotonic() - start)
            return known.speedup_on(self._first_ids)
        measured = known is not None and known.seconds  # a configuration that was only pruned is bounded again
        bound = None if measured else self._bound(trial.study, config)
        if bound is not None:
            trial.set_user_attr(PREDICTED, bound.predicted)
            if bound.cannot_win:
                self._record(trial, config, not_run, bound.reason(), time.monotonic() - start)
                raise optuna.TrialPruned(bound.reason())
        reason, begun, is_compared = None, time.monotonic(), config in self.compared
        try:
            reason = self._measure(trial, config, rows)
        except BackendError as error:
            if len(before) == len(failed) >= _REPLICATES:
                raise  # it can run nothing
            reason = f"{ENGINE_FAILED}: {error.reason}"
            trial.set_user_attr(ENGINE_LOG, error.log_tail)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = OUT_OF_MEMORY
        if reason == OUT_OF_MEMORY:
            release_memory()  # only here: the handled error refers to the memory
        if not is_compared:
            trial.set_user_attr(MEASURING_SECONDS, time.monotonic() - begun)
        if reason is None:
            check_output(row[BASELINE] for row in rows)
        measurement = Measurement.of(rows, BASELINE, CANDIDATE)
        self._record(trial, config, measurement, reason, time.monotonic() - start)
        if reason is not None:
            raise optuna.TrialPruned(reason)
        pooled = known or LeaderboardEntry(config)
        pooled.add(measurement.table())
        return pooled.speedup_on(self._first_ids)

    def _bound(self, study: optuna.Study, config: SpeculativeConfig) -> SpeedupBound | None:
        """Return the bound of a suggestion; None if there is none, or memory does not suffice to compute it."""
        bounds = self.bounds
        return None if bounds is None else within_memory(lambda: bounds.estimate(study, config))

    def _measure(self, trial: optuna.Trial, config: SpeculativeConfig, rows: list[dict[str, Sample]]) -> str | None:
        """Race a trial: measure a few prompts first; if it is level with the leader, more of them, and all again.

        Returns the reason for stopping early, or None for a trial that was measured to the end.
        """
        if config in self.compared:  # measured, and timed, with others
            rows += map(dict, self.compared.pop(config))
            for number, row in enumerate(rows):
                trial.report(pair_speedup(row[BASELINE], row[CANDIDATE]), number)
            if figures := sample_figures([row[CANDIDATE] for row in rows]):
                trial.set_user_attr(FIGURES, figures)
            return None
        settings, few = self.settings, len(self._first_ids)
        survives = config.kind != "none"  # every other trial measures plain decoding, too
        more = [item for item in self._survivors if survives and item.id not in self._first_ids]
        prompts = every = PromptSet((*self.first, *more))
        remeasured: set[int] = set()  # places of rows
        for repeat in range(settings.repeats + settings.survivor_repeats):
            if repeat >= settings.repeats and not (survives and self._is_level(trial.study, config, rows)):
                break
            # No two trials share a seed, else replicates would repeat the same draws.
            seed, begin = self.seed + _SEED_STEP * (trial.number + 1) + len(rows), len(rows)
            # One comparison for all prompts, as some drafters learn from prompt to prompt.
            for number, row in enumerate(self.bench.compare({CANDIDATE: config}, prompts, 1, seed, (), self.warming), 1):
                rows.append(row)
                self.on_prompt()
                # One step for each prompt of each repeat: the pruner compares trials at the same step.
                trial.report(pair_speedup(rows[-1][BASELINE], rows[-1][CANDIDATE]), repeat * len(every) + number - 1)
                is_last, is_first_look = number == len(prompts), repeat == 0 and number == few
                slower = not is_last and trial.should_prune() and self._is_slower(trial.study, config, rows)
                if slower or is_last or is_first_look:
                    if figures := dict(self.bench.figures()):
                        trial.set_user_attr(FIGURES, figures)
                    self._remeasure_drifted(trial, config, prompts, rows, begin, seed, remeasured)
                if is_first_look:
                    if more and not self._is_level(trial.study, config, rows):
                        survives = False
                        break
                elif slower and self._is_slower(trial.study, config, rows):
                    return "slower than the best so far"
            prompts = PromptSet(prompts.items[: len(rows) - begin])
        return None

    @staticmethod
    def _is_level(study: optuna.Study, config: SpeculativeConfig, rows: Sequence[dict[str, Sample]]) -> bool:
        """Return whether a trial is about as fast as plain decoding and as the leader, on the prompts that both decoded."""
        own = LeaderboardEntry(config)
        own.add(Measurement.of(rows, BASELINE, CANDIDATE).table())
        leader = next(iter(ranking(study)), LeaderboardEntry(config))
        common = own.seconds.keys() & leader.seconds.keys() or own.seconds.keys()
        return own.speedup_on(common) >= (1 - _LEVEL) * max(1.0, leader.speedup_on(common))

    @staticmethod
    def _is_slower(study: optuna.Study, config: SpeculativeConfig, rows: Sequence[dict[str, Sample]]) -> bool:
        """Return whether a trial is significantly slower than plain decoding or than the leader.

        The pruner compares on how many prompts the leader is ahead, not by how much. A lookup that is far ahead on few
        prompts may still be faster over all.
        """
        if Measurement.of(rows, BASELINE, CANDIDATE).interval(confidence=_PRUNING_CONFIDENCE)[1] < 1.0:
            return True
        leader = next(iter(ranking(study)), None)
        if leader is None or leader.config == config:
            return False
        against_leader = []
        for row in rows:
            own, plain, _ = leader.seconds.get(row[BASELINE].prompt_id, (0.0, 0.0, 0))
            if own and plain:
                seconds = row[BASELINE].decode_seconds * own / plain  # at the machine's present speed
                against_leader.append(row | {BASELINE: dataclasses.replace(row[BASELINE], decode_seconds=seconds)})
        measured = Measurement.of(against_leader, BASELINE, CANDIDATE)
        return bool(against_leader) and measured.interval(confidence=_PRUNING_CONFIDENCE)[1] < 1.0

    def _remeasure_drifted(
        self,
        trial: optuna.Trial,
        config: SpeculativeConfig,
        prompts: PromptSet,
        rows: list[dict[str, Sample]],
        begin: int,
        seed: int,
        remeasured: set[int],
    ) -> None:
        """Measure the rows with drift again, each once.

        Drafters that learn first decode as many prompts as before any trial.

        Args:
            prompts: of the rows from ``begin`` on.
            begin: place of the first row of the latest comparison.
            remeasured: places of rows that were measured twice; takes the new ones.
        """
        before = trial.study.get_trials(deepcopy=False, states=FINISHED)
        all_drifted = drifted_since(before, rows[begin:], self.settings.drift)
        for place, drifted in enumerate(drifted_rows(rows, self.settings.drift)[begin:]):
            if (drifted or all_drifted) and begin + place not in remeasured:
                remeasured.add(begin + place)
                trial.set_user_attr(DRIFTED, trial.user_attrs.get(DRIFTED, 0) + 1)
                earlier = (*self.warming, *prompts.items[:place])[-self.settings.warming or None :]
                one = PromptSet((prompts.items[place],))
                (row,) = self.bench.compare({CANDIDATE: config}, one, 1, seed + place, (), PromptSet(earlier))
                rows[begin + place] = row

    @defer_interrupt()
    def _record(
        self, trial: optuna.Trial, config: SpeculativeConfig, measurement: Measurement, reason: str | None, seconds: float
    ) -> None:
        """Store a trial's results; raise :class:`OutputChanged` if a float32 output differs from the baseline's."""
        trial.set_user_attr("seconds", seconds)
        if reason is not None:
            trial.set_user_attr("reason", reason)
        changed = False
        if measurement.candidate:
            changed = measurement.lossless.verdict == "different" and config.lossless
            trial.set_user_attr("measurement", measurement.to_dict())
            trial.set_user_attr("table", measurement.table())
            if changed and self.bench.exact:
                raise OutputChanged(f"trial {trial.number} changed a float32 output: {measurement.lossless}")
        # Last, because a constraint cannot be overwritten. Studies of earlier versions have the same two constraints.
        failed = reason is not None and reason.startswith((OUT_OF_MEMORY, ENGINE_FAILED))
        trial.set_constraint("out_of_memory", float(failed))
        trial.set_constraint("output_changed", float(changed))
