"""Which bars are met? Counts of what happened, each beside the share that it has to reach or must not exceed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Count:
    """How often something happened, and the bar for it.

    Args:
        name: what was counted.
        times: how often it happened.
        of: how often it could have.
        least: the share that it has to reach; None where there is no such bar.
        most: the share that it must not exceed; None where there is no such bar.
    """

    name: str
    times: int
    of: int
    least: float | None = None
    most: float | None = None

    @property
    def share(self) -> float:
        """Times of all; 0.0 of none."""
        return self.times / self.of if self.of else 0.0

    @property
    def passed(self) -> bool:
        """Whether the bar is met."""
        return (self.least is None or self.share >= self.least) and (self.most is None or self.share <= self.most)

    def bar(self) -> str:
        """The bar, in words."""
        if self.least is None and self.most is None:
            return "none"
        return f"at least {self.least:.0%}" if self.least is not None else f"at most {self.most:.0%}"


def table(counts: list[Count]) -> str:
    """Counts as Markdown."""
    lines = ["| counted | times | of | share | bar | |", "|---|---|---|---|---|---|"]
    for count in counts:
        met = "met" if count.passed else "MISSED"
        lines.append(f"| {count.name} | {count.times} | {count.of} | {count.share:.1%} | {count.bar()} | {met} |")
    return "\n".join(lines)
