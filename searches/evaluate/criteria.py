"""What all evaluation programs share: checks, criteria, the record that they end with, and tables in Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from layerskip.files import write_json
from searches.app.application import NOT_CONFIRMED
from searches.app.checks import check_list, check_seed, check_whole


@dataclass(frozen=True)
class Count:
    """Number of times that something happened, or a measured metric, and the criterion for it.

    Args:
        name: what was counted or measured.
        times: how often it happened, or the metric.
        of: how often it could have happened; 1 for a metric.
        minimum: smallest share that passes; None sets no lower limit.
        maximum: largest share that passes; None sets no upper limit.
    """

    name: str
    times: float
    of: float = 1
    minimum: float | None = None
    maximum: float | None = None

    @property
    def share(self) -> float:
        """``times / of``; 0.0 if ``of`` is 0."""
        return self.times / self.of if self.of else 0.0

    @property
    def passed(self) -> bool:
        """True if the criterion is met; False if the metric is not a number."""
        return (self.minimum is None or self.share >= self.minimum) and (self.maximum is None or self.share <= self.maximum)

    def cells(self) -> list[str]:
        """Return the count as a row of the table of criteria."""
        limits = {"at least": self.minimum, "at most": self.maximum}
        asked = ", ".join(f"{limit} {share:g}" for limit, share in limits.items() if share is not None)
        return [self.name, f"{self.times:g} of {self.of:g}", f"{self.share:.3g}", asked, "met" if self.passed else "MISSED"]


def check_fields(config: DictConfig, minimum: Mapping[str, int]) -> None:
    """Check the seed, and whole numbers or lists of them by their lowest value.

    Raises:
        InputError: a field is wrong; the message begins with its name.
    """
    check_seed(config.seed)
    for name, lowest in minimum.items():
        value = OmegaConf.select(config, name)
        if isinstance(value, ListConfig):
            check_list(name, value, or_empty=False)
        for item in value if isinstance(value, ListConfig) else [value]:
            check_whole(name, item, lowest)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def conclude(record: dict[str, Any], outputs: str, name: str, path: str | None, counts: Sequence[Count]) -> None:
    """Write a record and print its criteria.

    Args:
        record: of the program; gets ``counts``.
        outputs: folder of the program's outputs.
        name: of the file in it.
        path: of another file; None for that one.
        counts: judged events and metrics.

    Raises:
        SystemExit: a criterion is missed; exit code 4.
    """
    file = Path(path or Path(outputs) / name)
    record["counts"] = [asdict(count) | {"share": count.share, "passed": count.passed} for count in counts]
    write_json(file, record)
    if counts:
        print(table(["counted", "times", "share", "criterion", "result"], [count.cells() for count in counts]))
    print(f"wrote {file}")
    if not all(count.passed for count in counts):
        sys.exit(NOT_CONFIRMED)
