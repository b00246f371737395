"""Which configuration wins? The best few of a search, beside plain decoding, on prompts that the search never saw.

All are measured interleaved, prompt by prompt, and who learns from one learns for the next; prompts on which the machine's
pace had moved are measured once more before the verdict. After every few prompts a configuration leaves whose paired
interval lies wholly below the leader's pace; it ends when every prompt was decoded and one is left, or none that plain
decoding does not surely beat, or the budget of repeats is spent. Those that cannot be told from the fastest by then, and
seem hardly slower, tie with it, and the simplest of them wins: no model before a model, fewer skips, a shorter draft. A
configuration beats plain decoding when the whole interval of its held-out speedup lies above 1, at a confidence that leaves
95 % for all finalists together (Bonferroni); if none does, plain decoding wins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna

from layerskip import Measurement, PromptSet, SpeculativeConfig, mask
from layerskip.attachments import digests
from layerskip.files import digest
from layerskip.measure.measurement import CONFIDENCE, LEAST_RESAMPLED
from searches.app.resume_log import ResultLog
from searches.study.bench import BASELINE, Bench, Row, go_on, kept_row, seconds_of
from searches.study.drift import moved
from searches.study.leaderboard import LeaderboardEntry, contenders, is_lossless
from searches.study.objective import MeasureSettings

_HELD_OUT_SEED = 1_000_003
_KEPT = "finals-{}.jsonl"
_BLOCK = 6  # prompts between two looks at who is behind
_LOOKS = 1.25  # so many times the prompts of the last look are decoded before the next one
_LEAVING = 0.999  # confidence at which a configuration leaves; well above the verdict's, as it is looked at again and again
_LEVEL = 0.01  # few prompts cannot tell a tenth either, which simplicity is not worth
_SIMPLEST = (
    *("none", "prompt_lookup", "retrieval", "token_recycling", "lookahead", "layer_skip"),
    *("medusa", "eagle", "draft_model", "cross_tokenizer"),
)


@dataclass(frozen=True)
class Finalist:
    """A configuration, what the search thought of it, and what held-out prompts say.

    Args:
        config: the configuration.
        search_speedup: pooled over its trials.
        held_out: as :meth:`layerskip.Measurement.to_dict` gives it.
        low: the lower end of its interval, where all finalists' intervals together hold with 95 %.
        ties: whether it cannot be told from the fastest, and seems about as fast.
        stayed: whether it was measured to the end.
    """

    config: SpeculativeConfig
    search_speedup: float
    held_out: dict[str, Any]
    low: float
    ties: bool = True
    stayed: bool = True

    @property
    def keeps(self) -> bool:
        """Whether it kept the output, or does not promise to."""
        return is_lossless(self.held_out) or not self.config.lossless

    @property
    def eligible(self) -> bool:
        """Whether it kept the output, and its interval, over enough prompts to be one, lies above 1."""
        enough = self.held_out["prompts"] >= LEAST_RESAMPLED
        return self.stayed and self.keeps and enough and self.low > 1.0

    @property
    def complexity(self) -> tuple[int, int, bool, int, int, int]:
        """What ties are settled by: the kind of drafter, how many there are, whether anything stands in for what they skip,
        how much that is, whether they branch, and how far they draft."""
        parts = self.config.members or (self.config,)
        return (
            max(_SIMPLEST.index(part.kind) for part in parts),
            len(parts),
            any(part.bridge or part.draft_head for part in parts),
            sum(sum(mask.count(part.mask)) for part in parts),
            max(part.siblings for part in parts),
            max(part.draft_length for part in parts),
        )


@dataclass(frozen=True)
class Finals:
    """What held-out prompts say.

    Args:
        finalists: the fastest first.
        baseline: plain decoding's own figures.
        seconds: that measuring took.
        drifted: how often the pace on a prompt was off what is usual by more than ``measure.drift``, so that the prompt was
            measured again.
        unsteady: how often it still was.
    """

    finalists: tuple[Finalist, ...]
    baseline: dict[str, Any]
    seconds: float
    drifted: int = 0
    unsteady: int = 0

    @property
    def winner(self) -> Finalist:
        """The simplest of those that are eligible and tie with the fastest that is; else plain decoding."""
        eligible = [finalist for finalist in self.finalists if finalist.eligible]
        tied = [finalist for finalist in eligible[1:] if finalist.ties]
        plain = Finalist(SpeculativeConfig(), 1.0, self.baseline, 1.0)
        return min([*eligible[:1], *tied], key=lambda finalist: finalist.complexity, default=plain)


def measure_finals(
    study: optuna.Study,
    bench: Bench,
    prompts: PromptSet,
    settings: MeasureSettings,
    seed: int,
    folder: Path | None = None,
    on_prompt: Callable[[], None] = lambda: None,
    also: Sequence[LeaderboardEntry] = (),
) -> Finals:
    """Measure a study's finalists on held-out prompts.

    Args:
        also: further finalists, with what the search knew of those that they were made of.

    The others are those of :func:`compete`.
    """
    chosen = {str(i): entry for i, entry in enumerate([*contenders(study, settings.finalists), *also])}
    configs = {name: entry.config for name, entry in chosen.items()}
    before = {name: entry.speedup for name, entry in chosen.items()}
    found, _ = compete(configs, before, bench, prompts, settings, seed, folder, on_prompt)
    if folder is None:
        return found
    # Other finalists, of fewer trials, were measured for the same study.
    return replace(found, seconds=sum(seconds_of(ResultLog(path)) for path in folder.glob(_KEPT.format("*"))))


def compete(
    configs: Mapping[str, SpeculativeConfig],
    before: Mapping[str, float],
    bench: Bench,
    prompts: PromptSet,
    settings: MeasureSettings,
    seed: int,
    folder: Path | None = None,
    on_prompt: Callable[[], None] = lambda: None,
    leaving: bool = True,
) -> tuple[Finals, list[Row]]:
    """Measure configurations on held-out prompts.

    Args:
        configs: by name.
        before: the speedup that each was expected to have.
        bench: what they are measured on.
        prompts: kinds of work in turn, as :meth:`~layerskip.PromptSet.take` gives them: who leads on the first kind need
            not lead on all.
        settings: how often, and when again.
        seed: of orders and draws.
        folder: keeps what was measured, prompt by prompt, and is not measured again; None keeps nothing.
        on_prompt: called for every prompt, kept or measured.
        leaving: whether who is surely behind is measured no more.

    Returns:
        the verdict, and the rows that it is drawn from.
    """
    asked: list[Any] = [[[config.to_dict(), digests(config)] for config in configs.values()], prompts.digest, seed]
    asked += [bench.conditions]
    asked += [] if leaving else ["all to the end"]
    kept = ResultLog(None if folder is None else folder / _KEPT.format(digest(asked)[:12]))
    rows: list[Row] = []
    left, gone, looked = dict(configs), set[str](), 0
    for repeat in range(settings.held_out_repeats):
        for number, row in enumerate(go_on(bench, left, prompts, _seed(seed, repeat), kept, str(repeat), gone), 1):
            rows.append(row)
            on_prompt()
            last = number == len(prompts)  # behind it there may be another repeat to save
            enough = leaving and len({row[BASELINE].prompt_id for row in rows}) >= 2 * _BLOCK
            if enough and (last or (number % _BLOCK == 0 and len(rows) >= _LOOKS * looked)):
                looked = len(rows)
                gone |= {name for name in left if _is_behind(rows, left, name)}
                left = {name: config for name, config in left.items() if name not in gone}
        if leaving and _is_settled(rows, left):
            break
    again = measure_again(bench, left, rows, prompts, settings, seed, kept)
    rows = [again.get(place, row) for place, row in enumerate(rows)]
    finalists, baseline = judge_rows(rows, configs, before, left), Measurement.of(rows, BASELINE, BASELINE).to_dict()
    still = sum(off for place, off in enumerate(moved(rows, settings.drift)) if place in again)
    found = Finals(finalists, baseline, seconds_of(kept), len(again), still)
    return found, rows


def judge_rows(
    rows: Sequence[Row], configs: Mapping[str, SpeculativeConfig], before: Mapping[str, float], left: Collection[str]
) -> tuple[Finalist, ...]:
    """What rows of held-out prompts say of configurations, the fastest first.

    Args:
        rows: plain decoding in each, beside those configurations that were measured on the prompt.
        configs: by name.
        before: the speedup that each was expected to have.
        left: those that stayed to the end.
    """
    found = {name: Measurement.of([row for row in rows if name in row], BASELINE, name) for name in configs}
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(configs))
    finalists = [
        Finalist(config, before[name], found[name].to_dict(), found[name].interval(confidence=confidence)[0])
        for name, config in configs.items()
    ]
    stayed = [pair for pair in zip(finalists, configs, strict=True) if pair[1] in left]
    fastest = max(stayed, key=lambda pair: _order(pair[0]), default=(None, BASELINE))[1]
    finalists = [
        replace(finalist, stayed=name in left, ties=name in left and (name == fastest or _ties(rows, fastest, name)))
        for name, finalist in zip(configs, finalists, strict=True)
    ]
    finalists.sort(key=lambda finalist: (not finalist.stayed, -finalist.held_out["speedup"]))
    return tuple(finalists)


def _order(finalist: Finalist) -> tuple[bool, float]:
    return finalist.eligible, finalist.held_out["speedup"]


def measure_again(
    bench: Bench,
    configs: Mapping[str, SpeculativeConfig],
    rows: Sequence[Row],
    prompts: PromptSet,
    settings: MeasureSettings,
    seed: int,
    kept: ResultLog,
) -> dict[int, Row]:
    """Once more, by their places, the rows that the machine's pace had moved in; whoever learns has learnt from prompts
    before, as many as in a trial."""
    found: dict[int, Row] = {}
    for place, off in enumerate(moved(rows, settings.drift)):
        if off:
            repeat, number = divmod(place, len(prompts))
            item, before = prompts.items[number], PromptSet(prompts.items[max(0, number - settings.warming) : number])
            name = f"{repeat} {item.id} again"
            measured = bench.compare(configs, PromptSet((item,)), 1, _seed(seed, repeat) + number, (), before)
            found[place] = kept_row(measured, kept, name)
    return found


def _seed(seed: int, repeat: int) -> int:
    """Draws and orders other than any trial's, and other ones in each repeat."""
    return seed + _HELD_OUT_SEED + 7919 * repeat


def _is_behind(rows: Sequence[Row], configs: Mapping[str, SpeculativeConfig], name: str) -> bool:
    """Whether a configuration's paired interval lies wholly below the pace of the leader, which kept the output."""
    measured = {other: Measurement.of(rows, BASELINE, other) for other in configs}
    changed = {other: measured[other].lossless.verdict == "different" and configs[other].lossless for other in configs}
    leader = max(configs, key=lambda other: (not changed[other], measured[other].speedup))
    return name != leader and _is_slower(rows, leader, name)


def _is_settled(rows: Sequence[Row], left: Collection[str]) -> bool:
    """Whether more repeats would tell nothing new: nobody can win any more, or one alone, who is surely ahead or behind."""
    slower = all(_is_slower(rows, BASELINE, name) for name in left)
    return slower or (len(left) == 1 and all(_is_slower(rows, name, BASELINE) for name in left))


def _is_slower(rows: Sequence[Row], other: str, name: str) -> bool:
    """Whether a configuration is surely slower than another one, or than plain decoding."""
    return Measurement.of(rows, other, name).interval(confidence=_LEAVING)[1] < 1.0


def _ties(rows: Sequence[Row], fastest: str, name: str) -> bool:
    """Whether a configuration cannot be told from the fastest on the prompts that both decoded, and seems about as fast."""
    found = Measurement.of([row for row in rows if name in row and fastest in row], fastest, name)
    return found.speedup >= 1 - _LEVEL and found.interval()[1] >= 1.0
