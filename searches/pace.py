"""Has the machine's pace moved? Plain decoding, which is measured beside everything else, and all beside it tell together.

A window in which the machine was slower slows everybody down, a stall only whom it hits. Were plain decoding's stalls alone
measured again, its time would lose what the others' keep, and every speedup with it: so a row of samples is judged by the
mean of all that are in it, and replaced as a whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from scipy.stats import theilslopes

from layerskip.measurement import Sample


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


def _offsets(samples: Sequence[Sample]) -> list[float]:
    """How far, on a log scale, each sample's seconds per round are off what is usual, drafting left out: a cascade may draft
    dearly on one prompt and for nothing on the next.

    A round is slower behind a long prompt, and how long one is shows in its prefill: a line through all (Theil, Sen).
    """
    lengths = [sample.prefill_seconds for sample in samples]
    paces = [(sample.decode_seconds - sample.draft_seconds) / len(sample.stats.rounds) for sample in samples]
    if len(set(lengths)) > 1:
        slope, level, *_ = theilslopes(paces, lengths)
    else:
        slope, level = 0.0, statistics.median(paces or [1.0])
    expected = [level + slope * length for length in lengths]
    return [math.log(pace / usual) if pace > 0 and usual > 0 else 0.0 for pace, usual in zip(paces, expected, strict=True)]
