"""Has the machine's pace moved? Plain decoding, which is measured beside everything else, and all beside it tell together.

A window in which the machine was slower slows everybody down, a stall only whom it hits. Were plain decoding's stalls alone
measured again, its time would lose what the others' keep, and every speedup with it: so a row of samples is judged by the
mean of all that are in it, and replaced as a whole. A window as long as a trial shows in none of its rows, which are slow
alike: it is told by what plain decoding did on the same prompts in the trials before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from optuna.trial import FrozenTrial
from scipy.stats import theilslopes

from layerskip.measure.measurement import Sample
from searches.study.bench import BASELINE

_RECENT = 3  # trials: a machine that stays slower is the usual one after two
_FEWEST = 3  # rows of a window, of which one may have stalled


def moved(rows: Sequence[Mapping[str, Sample]], drift: float) -> list[bool]:
    """Whether those who decoded a prompt were all in all off their usual pace.

    Args:
        rows: samples by name, each row of one prompt.
        drift: by what share, in the geometric mean over a row, seconds per round may be off what the other rows lead to
            expect.
    """
    found: list[list[float]] = [[] for _ in rows]
    for name in dict.fromkeys(name for row in rows for name in row):
        places = [place for place, row in enumerate(rows) if name in row and row[name].stats.rounds]
        for place, off in zip(places, _offsets([rows[place][name] for place in places]), strict=True):
            found[place].append(off)
    return [bool(offs) and abs(statistics.fmean(offs)) > math.log1p(drift) for offs in found]


def moved_since(trials: Sequence[FrozenTrial], rows: Sequence[Mapping[str, Sample]], drift: float) -> bool:
    """Whether plain decoding was off its pace in the latest trials, in the median over rows, by more than ``drift``.

    Args:
        trials: before this one, in order.
        rows: samples of this trial, each row of one prompt.
    """
    before: dict[str, list[float]] = {}
    for trial in [trial for trial in trials if "table" in trial.user_attrs][-_RECENT:]:
        table = trial.user_attrs["table"]
        for prompt, rate in zip(table["prompt_id"], table["baseline_tokens_per_second"], strict=True):
            if rate:
                before.setdefault(prompt, []).append(rate)
    plain = [row[BASELINE] for row in rows]
    offs = [
        math.log(one.tokens_per_second / statistics.median(before[one.prompt_id]))
        for one in plain
        if one.prompt_id in before and one.tokens_per_second
    ]
    return len(offs) >= _FEWEST and abs(statistics.median(offs)) > math.log1p(drift)


def _offsets(samples: Sequence[Sample]) -> list[float]:
    """How far, on a log scale, each sample's seconds per round are off what is usual, drafting left out: a cascade may draft
    dearly on one prompt and for nothing on the next.

    A round is slower behind a long prompt, and how long one is shows in its prefill; and it is slower where it verifies
    more tokens, of which a lookup finds many on one prompt and hardly any on the next.
    """
    paces = [(sample.decode_seconds - sample.draft_seconds) / len(sample.stats.rounds) for sample in samples]
    lengths = [sample.prefill_seconds for sample in samples]
    verified = [statistics.fmean(round_.drafted for round_ in sample.stats.rounds) for sample in samples]
    expected = _line(lengths, paces)
    left = [pace - usual for pace, usual in zip(paces, expected, strict=True)]
    expected = [usual + dearer for usual, dearer in zip(expected, _line(verified, left), strict=True)]
    return [math.log(pace / usual) if pace > 0 and usual > 0 else 0.0 for pace, usual in zip(paces, expected, strict=True)]


def _line(causes: Sequence[float], effects: Sequence[float]) -> list[float]:
    """What each cause leads to expect: on a line that few outliers do not move (Theil, Sen), or, where all are alike, the
    median."""
    if len(set(causes)) > 1:
        slope, level, *_ = theilslopes(effects, causes)
        return [float(level + slope * cause) for cause in causes]
    return [statistics.median(effects)] * len(effects) if effects else []
