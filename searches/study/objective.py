"""What is a trial worth? Its paired speedup over plain decoding, really measured.

Everything that is known of a trial is put into its user attributes, so the study alone is enough to rebuild its records
elsewhere. Running out of memory is knowledge: a reason and a violated constraint. Anything else that goes wrong is a defect
and is raised.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna

from layerskip import Measurement, PromptSet, SpeculativeConfig
from layerskip.device.memory import out_of_memory, release
from layerskip.measure.measurement import Sample, pair_speedup
from searches.app.checks import check_number, check_whole
from searches.app.interrupt import undisturbed
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, Bench
from searches.study.drift import moved, moved_since
from searches.study.leaderboard import FINISHED, LeaderboardEntry, leaderboard, ranking
from searches.study.pruning import Judgement, Prior
from searches.tracking.names import DRIFTED, PREDICTED

MEASURING = "measuring_seconds"
"""Of a trial's seconds, those of decoding: neither of fitting or timing what it is made of, nor of foretelling it."""
OUT_OF_MEMORY = "out of memory"

_CANDIDATE = "candidate"
_APART = 10_000_019  # draws of two trials lie so far apart, which count up prompt by prompt
_KNOWN = "measured often enough"
_REPLICATES = 2  # whole measurements of a configuration that does not lead; samplers repeat themselves
_LEVEL = 0.02  # so close behind the best, a trial is level with it
_PRUNING = 0.9  # confidence at which a trial is behind the leader


class OutputChanged(RuntimeError):
    """Drafting changed a float32 output: a defect of the decoder, never a property of a configuration."""


@dataclass(frozen=True)
class MeasureSettings:
    """How trials and finals are measured.

    Args:
        max_new_tokens: per prompt and turn.
        prompts: tune prompts per trial, taken from the categories in turn; None takes all.
        survivor_prompts: tune prompts of a trial that is level with the best so far; None takes all.
        repeats: how often a trial decodes each of them.
        survivor_repeats: how often again one that is still level then.
        drift: a prompt is measured again, and flagged, where the pace of plain decoding and of all beside it is off what
            the other prompts lead to expect by more than this share, all in all; so are all of a trial where plain decoding
            is off its pace of the trials before.
        held_out_prompts: held-out prompts of the finals; None takes all.
        held_out_repeats: how often the finals decode each of them at most.
        finalists: distinct configurations that are measured again on held-out prompts, beside the best of other makes and
            the first of the leader's.
        warming: other tune prompts that who learns from prompt to prompt decodes before each trial, unmeasured, as it would
            have decoded some in use.
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

    def __post_init__(self) -> None:
        check_number("measure.drift", self.drift)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "drift" and (value is not None or not field.name.endswith("prompts")):
                check_whole(f"measure.{field.name}", value, 0 if field.name in ("survivor_repeats", "warming") else 1)


class Objective:
    """Measures the configuration that a trial proposes.

    Args:
        bench: what configurations are measured on.
        space: turns trials into configurations.
        prompts: the tune prompts, of which every trial takes as many as the settings say.
        settings: how much is decoded.
        seed: of orders and draws.
        on_prompt: called after every prompt, for a progress bar.
        prior: says which suggestions are not worth running; None runs all.
        begin: place of the first prompt that trials take, so that another seed's may take others.
    """

    def __init__(
        self,
        bench: Bench,
        space: SearchSpace,
        prompts: PromptSet,
        settings: MeasureSettings,
        seed: int,
        on_prompt: Callable[[], None] = lambda: None,
        prior: Prior | None = None,
        begin: int = 0,
    ) -> None:
        self.prior = prior
        self.bench, self.space, self.prompts = bench, space, prompts
        self.settings, self.seed, self.on_prompt = settings, seed, on_prompt
        self._first, self._survivors = (prompts.take(some, begin) for some in (settings.prompts, settings.survivor_prompts))
        self._first_ids = frozenset(item.id for item in self._first)
        measured = self._first_ids.union(item.id for item in self._survivors)
        others = [item for item in prompts.take(None) if item.id not in measured]
        self._warming = PromptSet(tuple(others[: settings.warming]))

    def __call__(self, trial: optuna.Trial) -> float:
        """Measure, report prompt by prompt, and return the speedup.

        Raises:
            optuna.TrialPruned: the pruner has seen enough, or memory ran out (the attribute ``reason`` says which).
            OutputChanged: a float32 output differs from the baseline's.
        """
        start = time.monotonic()  # a suggestion's bridges are fitted now, if nobody asked for them before
        config = self.space.suggest(trial)
        trial.set_user_attr("config", config.to_dict())
        rows: list[dict[str, Sample]] = []
        nothing = Measurement((), ())
        known = leaderboard(trial.study.get_trials(deepcopy=False, states=FINISHED)).get(config)
        enough = _REPLICATES if config.kind != "none" else 1  # plain decoding is measured beside every other trial
        if known is not None and known.complete >= enough and not self._leads(trial.study, config):
            self._record(trial, config, nothing, _KNOWN, time.monotonic() - start)
            return known.speedup_on(self._first_ids)
        measured = known is not None and known.seconds  # one that was ruled out before is judged again
        judgement = None if measured else self._judge(trial.study, config)
        if judgement is not None:
            trial.set_user_attr(PREDICTED, judgement.predicted)
            if judgement.hopeless:
                self._record(trial, config, nothing, judgement.reason(), time.monotonic() - start)
                raise optuna.TrialPruned(judgement.reason())
        reason, begun = None, time.monotonic()
        try:
            reason = self._measure(trial, config, rows)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            reason = OUT_OF_MEMORY
        if reason == OUT_OF_MEMORY:
            release()  # not before here: the handled error would still hold what it failed on
        trial.set_user_attr(MEASURING, time.monotonic() - begun)
        measurement = Measurement.of(rows, BASELINE, _CANDIDATE)
        self._record(trial, config, measurement, reason, time.monotonic() - start)
        if reason is not None:
            raise optuna.TrialPruned(reason)
        pooled = known or LeaderboardEntry(config)
        pooled.add(measurement.table())
        return pooled.speedup_on(self._first_ids)

    @staticmethod
    def _leads(study: optuna.Study, config: SpeculativeConfig) -> bool:
        """The leader is measured again and again; others are known after a few replicates."""
        return any(leader.config == config for leader in ranking(study)[:1])

    def _judge(self, study: optuna.Study, config: SpeculativeConfig) -> Judgement | None:
        """What is known of a suggestion beforehand; nothing where finding out takes more memory than there is."""
        if self.prior is None:
            return None
        try:
            return self.prior.judge(study, config)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
        release()
        return None

    def _measure(self, trial: optuna.Trial, config: SpeculativeConfig, rows: list[dict[str, Sample]]) -> str | None:
        """Race: a few prompts first; more of them, and all again, for who is level with the best."""
        settings, few = self.settings, len(self._first_ids)
        more = [item for item in self._survivors if item.id not in self._first_ids]
        survives = config.kind != "none"  # plain decoding is measured beside every other trial
        if not survives:
            more = []
        prompts = every = PromptSet((*self._first, *more))
        again: set[int] = set()  # places of rows that were measured twice
        for repeat in range(settings.repeats + settings.survivor_repeats):
            if repeat >= settings.repeats and not (survives and self._is_level(trial.study, config, rows)):
                break
            # No two trials draw alike: the leader's replicates would be one.
            seed, begin = self.seed + _APART * (trial.number + 1) + len(rows), len(rows)
            # One comparison for all, as some drafters learn from prompt to prompt.
            for number, row in enumerate(self.bench.compare({_CANDIDATE: config}, prompts, 1, seed, (), self._warming), 1):
                rows.append(row)
                self.on_prompt()
                # One step for each prompt of each repeat: the pruner compares what trials reported at the same one.
                trial.report(pair_speedup(rows[-1][BASELINE], rows[-1][_CANDIDATE]), repeat * len(every) + number - 1)
                behind = number < len(prompts) and trial.should_prune() and self._is_behind(trial.study, config, rows)
                if behind or number == len(prompts) or (repeat == 0 and number == few):
                    # Before anything is made of them.
                    self._steady(trial, config, prompts, rows, begin, seed, again)
                if repeat == 0 and number == few:
                    if more and not self._is_level(trial.study, config, rows):
                        survives = False
                        break
                # Behind the last prompt there is nothing left to save.
                elif behind and self._is_behind(trial.study, config, rows):
                    return "slower than the best so far"
            prompts = PromptSet(prompts.items[: len(rows) - begin])
        return None

    @staticmethod
    def _is_level(study: optuna.Study, config: SpeculativeConfig, rows: Sequence[dict[str, Sample]]) -> bool:
        """Whether it is about as fast as plain decoding and as the leader, on the prompts that both decoded."""
        own = LeaderboardEntry(config)
        own.add(Measurement.of(rows, BASELINE, _CANDIDATE).table())
        leader = next(iter(ranking(study)), LeaderboardEntry(config))
        common = own.seconds.keys() & leader.seconds.keys() or own.seconds.keys()
        return own.speedup_on(common) >= (1 - _LEVEL) * max(1.0, leader.speedup_on(common))

    @staticmethod
    def _is_behind(study: optuna.Study, config: SpeculativeConfig, rows: Sequence[dict[str, Sample]]) -> bool:
        """Whether plain decoding's or the leader's pace lies above the whole interval of this one's.

        The pruner's ranks see on how many prompts the leader is ahead, not by how much: a lookup that is far ahead on few
        may be the faster one in all.
        """
        if Measurement.of(rows, BASELINE, _CANDIDATE).interval(confidence=_PRUNING)[1] < 1.0:
            return True
        leader = next(iter(ranking(study)), None)
        if leader is None or leader.config == config:
            return False
        led = []
        for row in rows:
            own, plain, _ = leader.seconds.get(row[BASELINE].prompt_id, (0.0, 0.0, 0))
            if own and plain:
                seconds = row[BASELINE].decode_seconds * own / plain  # at the machine's pace of now
                led.append(row | {BASELINE: dataclasses.replace(row[BASELINE], decode_seconds=seconds)})
        return bool(led) and Measurement.of(led, BASELINE, _CANDIDATE).interval(confidence=_PRUNING)[1] < 1.0

    def _steady(
        self,
        trial: optuna.Trial,
        config: SpeculativeConfig,
        prompts: PromptSet,
        rows: list[dict[str, Sample]],
        begin: int,
        seed: int,
        again: set[int],
    ) -> None:
        """Measure those rows again that the machine's pace had moved in, each once.

        Who learns from prompt to prompt knows at the second one what as many prompts have taught it as before any trial.

        Args:
            prompts: of the rows from ``begin`` on.
            rows: a trial's; some may be replaced.
            begin: where the last comparison's begin.
            seed: of its draws.
            again: places of rows that were measured twice; takes the others.
        """
        before = trial.study.get_trials(deepcopy=False, states=FINISHED)
        whole = moved_since(before, rows[begin:], self.settings.drift)
        for place, off in enumerate(moved(rows, self.settings.drift)[begin:]):
            if (off or whole) and begin + place not in again:
                again.add(begin + place)
                trial.set_user_attr(DRIFTED, trial.user_attrs.get(DRIFTED, 0) + 1)
                earlier = (*self._warming, *prompts.items[:place])[-self.settings.warming or None :]
                once = PromptSet((prompts.items[place],))
                (row,) = self.bench.compare({_CANDIDATE: config}, once, 1, seed + place, (), PromptSet(earlier))
                rows[begin + place] = row

    @undisturbed()
    def _record(
        self,
        trial: optuna.Trial,
        config: SpeculativeConfig,
        measurement: Measurement,
        reason: str | None,
        seconds: float,
    ) -> None:
        trial.set_user_attr("seconds", seconds)
        if reason is not None:
            trial.set_user_attr("reason", reason)
        changed = False
        if measurement.candidate:
            verdict = measurement.lossless.verdict
            changed = verdict == "different" and config.lossless
            trial.set_user_attr("measurement", measurement.to_dict())
            trial.set_user_attr("table", measurement.table())
            if changed and self.bench.exact:
                raise OutputChanged(f"trial {trial.number} changed a float32 output: {measurement.lossless}")
        # Last, because a constraint is first-write-wins.
        trial.set_constraint("out_of_memory", float(reason == OUT_OF_MEMORY))
        trial.set_constraint("output_changed", float(changed))
