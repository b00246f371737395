"""Has the machine's pace moved? Plain decoding, which is measured beside everything else, tells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scipy.stats import theilslopes

from layerskip.measurement import Sample

_LEAST = 3  # measurements of a prompt before its usual pace is known


class Paces:
    """Plain decoding's pace on prompts that are decoded again and again.

    Args:
        drift: by what share it may be off its median on a prompt.
    """

    def __init__(self, drift: float) -> None:
        self._drift = drift
        self._known: dict[str, list[float]] = {}

    def add(self, prompt_id: str, pace: float) -> None:
        """Another measurement, in tokens per second."""
        self._known.setdefault(prompt_id, []).append(pace)

    def moved(self, plain: Sample) -> bool:
        """Whether a sample is off what is usual for its prompt, as far as that is known."""
        known = self._known.get(plain.prompt_id, [])
        return len(known) >= _LEAST and _off(plain, statistics.median(known), self._drift)


def moved_among(samples: Sequence[Sample], drift: float) -> list[bool]:
    """Whether plain decoding's pace on each prompt is off, by more than a share, what the others' lead to expect.

    It is slower behind long prompts, and how long one is shows in its prefill: a line through all (Theil, Sen).
    """
    plain = [sample for sample in samples if sample.tokens_per_second]
    lengths, paces = [sample.prefill_seconds for sample in plain], [1 / sample.tokens_per_second for sample in plain]
    if len(set(lengths)) > 1:
        slope, level, *_ = theilslopes(paces, lengths)
    else:
        slope, level = 0.0, statistics.median(paces or [1.0])
    expected = [level + slope * sample.prefill_seconds for sample in samples]
    return [pace > 0 and _off(sample, 1 / pace, drift) for sample, pace in zip(samples, expected, strict=True)]


def _off(plain: Sample, usual: float, drift: float) -> bool:
    """An empty output has no pace."""
    pace = plain.tokens_per_second
    return bool(pace and usual) and max(pace / usual, usual / pace) > 1 + drift
