"""Pass criteria of the evaluation programs: counts of events, each with the share that it must reach or must not exceed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Count:
    """Number of times that something happened, and the criterion for it.

    Args:
        name: what was counted.
        times: how often it happened.
        of: how often it could have happened.
        least: smallest share that passes; None sets no lower limit.
        most: largest share that passes; None sets no upper limit.
    """

    name: str
    times: int
    of: int
    least: float | None = None
    most: float | None = None

    @property
    def share(self) -> float:
        """``times / of``; 0.0 if ``of`` is 0."""
        return self.times / self.of if self.of else 0.0

    @property
    def passed(self) -> bool:
        """True if the criterion is met."""
        return (self.least is None or self.share >= self.least) and (self.most is None or self.share <= self.most)

    @property
    def criterion(self) -> str:
        """The criterion in words."""
        if self.least is not None and self.least == self.most:
            return f"exactly {self.least:.0%}"
        if self.least is not None:
            return f"at least {self.least:.0%}"
        return "none" if self.most is None else f"at most {self.most:.0%}"


def table(counts: list[Count]) -> str:
    """Return counts as a Markdown table."""
    lines = ["| counted | times | of | share | criterion | result |", "|---|---|---|---|---|---|"]
    for count in counts:
        result = "met" if count.passed else "MISSED"
        lines.append(f"| {count.name} | {count.times} | {count.of} | {count.share:.1%} | {count.criterion} | {result} |")
    return "\n".join(lines)
