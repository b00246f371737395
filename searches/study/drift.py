"""Detection of drift: windows in which the machine was slower or faster than usual.

Plain decoding is measured with every candidate, and all samples of a prompt form a row. A slow window slows down the whole
row; a stall slows down one sample. If stalls of plain decoding alone were measured again, its time would drop while
candidates kept their stalls, and every speedup would be biased. A row is therefore judged by the mean over all its samples,
and replaced as a whole.

A window as long as a trial slows down all its rows alike. It shows in plain decoding on the same prompts in earlier trials.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from optuna.trial import FrozenTrial
from scipy.stats import theilslopes

from layerskip.measure.measurement import Sample
from searches.study.bench import BASELINE

_RECENT = 3  # trials; a machine that stays slower is the usual one after two
_FEWEST = 3  # rows of a window, of which one may have stalled


def drifted_rows(rows: Sequence[Mapping[str, Sample]], drift: float) -> list[bool]:
    """Return for each row, which is of one prompt, whether the machine had drifted while it was measured.

    ``drift`` is the tolerated share by which seconds per round may differ from what the other rows predict, in the geometric
    mean over the row.
    """
    offsets: list[list[float]] = [[] for _ in rows]
    for name in dict.fromkeys(name for row in rows for name in row):
        places = [place for place, row in enumerate(rows) if name in row and row[name].stats.rounds]
        for place, offset in zip(places, _offsets([rows[place][name] for place in places]), strict=True):
            offsets[place].append(offset)
    return [bool(row) and abs(statistics.fmean(row)) > math.log1p(drift) for row in offsets]


def drifted_since(trials: Sequence[FrozenTrial], rows: Sequence[Mapping[str, Sample]], drift: float) -> bool:
    """Return whether the machine has drifted between the latest of some trials, in order, and the rows of a trial.

    ``drift`` is the tolerated share by which plain decoding's tokens/s may differ, in the median over rows.
    """
    earlier: dict[str, list[float]] = {}
    for trial in [trial for trial in trials if "table" in trial.user_attrs][-_RECENT:]:
        table = trial.user_attrs["table"]
        for prompt, rate in zip(table["prompt_id"], table["baseline_tokens_per_second"], strict=True):
            if rate:
                earlier.setdefault(prompt, []).append(rate)
    offsets = [
        math.log(plain.decoded_tokens / plain.decode_seconds / statistics.median(earlier[plain.prompt_id]))
        for plain in [row[BASELINE] for row in rows]
        if plain.prompt_id in earlier and plain.decoded_tokens
    ]
    return len(offsets) >= _FEWEST and abs(statistics.median(offsets)) > math.log1p(drift)


def _offsets(samples: Sequence[Sample]) -> list[float]:
    """Return the log ratio of each sample's seconds per round to the expected ones.

    Drafting is left out: a cascade may draft at a high cost on one prompt and for nothing on the next. A round is slower
    after a long prompt, whose length shows in the prefill. It is also slower if it verifies more tokens; a lookup finds many
    on one prompt and few on another.
    """
    seconds = [(sample.decode_seconds - sample.draft_seconds) / len(sample.stats.rounds) for sample in samples]
    prefill = [sample.prefill_seconds for sample in samples]
    verified = [statistics.fmean(round_.drafted for round_ in sample.stats.rounds) for sample in samples]
    expected = _fit(prefill, seconds)
    rest = [own - usual for own, usual in zip(seconds, expected, strict=True)]
    expected = [usual + extra for usual, extra in zip(expected, _fit(verified, rest), strict=True)]
    return [math.log(own / usual) if own > 0 and usual > 0 else 0.0 for own, usual in zip(seconds, expected, strict=True)]


def _fit(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """Return the fitted ``ys`` of a Theil-Sen line, which few outliers do not move; their median if all ``xs`` are equal."""
    if len(set(xs)) > 1:
        slope, intercept, *_ = theilslopes(ys, xs)
        return [float(intercept + slope * x) for x in xs]
    return [statistics.median(ys)] * len(ys) if ys else []
