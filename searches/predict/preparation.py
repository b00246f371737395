"""Preparation of a study before its first trial: continuations of the target, a cost profile, and a speedup predictor.

All results are stored: continuations and cost profiles in the outputs folder for all studies, scans in the study's folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from layerskip import DraftPlan, PromptSet, Sampling, StopRule, Target, UnsupportedModel
from layerskip.costs.cost_model import CostProfile
from layerskip.costs.profile import profile_costs
from layerskip.costs.timing import MIN_REPEATS
from layerskip.device.memory import within_memory
from layerskip.files import digest, read_json, write_json
from layerskip.models.environment import machine
from layerskip.models.packing import refuse_quantized
from layerskip.scan.scan import Scanner
from layerskip.texts.continuations import Continuation, ReportCost, continue_prompts
from searches.app.checks import check_flag, check_list, check_number, check_whole
from searches.predict.proposals import ProposalSettings
from searches.predict.scan_predictor import DraftChoice, ScanPredictor, masks_at_once, mean_context, merged_choices
from searches.progress import counting, say
from searches.results import exclusive
from searches.space.search_space import LOOKUP, SearchSpace
from searches.workers.pool import ALONE, Workers

PROFILE_REPEATS = 8  # runs of every part of a round
_SCAN_VERSION = 6  # of the counts; those of another version are scanned again
_PROFILE_VERSION = 7  # of stored profiles and their measurement
_CPU_ROWS, _GPU_ROWS = 256, 2048  # rows per pass, if memory suffices
_MIN_ROWS = 16  # with fewer rows per pass, scanning is no faster than decoding
_TEXT_BYTES = 2_000_000_000  # of the target's own states of the continuations; passes hold keys and values once more


@dataclass(frozen=True)
class ScanSettings:
    """Amount of prediction before the first trial.

    Args:
        enabled: whether masks are scanned at all.
        prompts: the number of tune prompts whose continuations are scanned, chosen by the seed; None for all.
        thresholds: thresholds of the stop rules that scanned masks are combined with.
        proposals: how many masks are screened, scanned and enqueued.
    """

    enabled: bool = True
    prompts: int | None = 4
    thresholds: Sequence[float] = (0.5, 0.6, 0.7, 0.8, 0.9)
    proposals: ProposalSettings = field(default_factory=ProposalSettings)

    def __post_init__(self) -> None:
        if self.prompts is not None:
            check_whole("scan.prompts", self.prompts)
        check_flag("scan.enabled", self.enabled)
        check_list("scan.thresholds", self.thresholds, or_empty=False)
        for value in self.thresholds:
            check_number("scan.thresholds", value, 1, or_zero=True)

    def choices(self, space: SearchSpace, method: str) -> list[DraftChoice]:
        """Return the draft lengths and stop rules of a method's predictions, without adaptive rules."""
        shortest, longest = space.values(method, "num_speculative_tokens")
        stops, lengths = self._stops(space.values(method, "stop")), range(shortest, longest + 1)
        return [(length, stop) for length in lengths for stop in stops]

    def _stops(self, searched: Sequence[str]) -> tuple[StopRule, ...]:
        values = dict.fromkeys(map(float, self.thresholds)) if "threshold" in searched else ()
        return (*([StopRule()] if "length" in searched else []), *(StopRule("threshold", value) for value in values))


@dataclass(frozen=True)
class Preparation:
    """Preparation of predictions for one target."""

    target: Target
    sampling: Sampling
    outputs: Path  # the folder of continuations and profiles
    report_cost: ReportCost = lambda *_: None
    pool: Workers = ALONE  # the workers that share all of this
    is_over: Callable[[], bool] = lambda: False  # whether time has run out: nothing more is measured than a profile needs

    def predictor(
        self, prompts: PromptSet, max_new_tokens: int, space: SearchSpace, settings: ScanSettings, folder: Path, seed: int
    ) -> ScanPredictor | None:
        """Prepare the predictor of a study; print a line and return None if the model can decode but not be scanned."""
        choices = {method: found for method in space.scanned if (found := settings.choices(space, method))}
        if not choices:
            say("scan: adaptive stop rules, the only ones of the space, are not predicted")
            return None
        scanner = self.scanner(prompts, max_new_tokens, space, seed)
        if scanner is None:
            return None
        longest = max(length for some in choices.values() for length, _ in some)
        lookups = space.values(LOOKUP, "num_speculative_tokens")[1] if LOOKUP in space.available_methods else 0
        reads_formats = "quantized" in choices and not refuse_quantized(self.target.model)
        formats = space.formats if reads_formats else ()
        profile = self.cost_profile(scanner.continuations, max(longest, lookups), formats)
        identity = {
            "target": self.target.digest,
            "continuations": [astuple(continuation) for continuation in scanner.continuations],
            "sampling": self.sampling.to_dict(),
            "choices": [[length, stop.to_dict()] for length, stop in merged_choices(choices)],
            "machine": machine(self.target),  # another machine may round near-ties differently, and has other costs
            "recipe": _SCAN_VERSION,
        }
        place = folder / f"scans-{digest(identity)[:16]}"
        return ScanPredictor(scanner, profile, choices, place, pool=self.pool)

    def scanner(self, prompts: PromptSet, max_new_tokens: int, space: SearchSpace, seed: int) -> Scanner | None:
        """Return a scanner of the target's continuations; print a line and return None if it cannot be scanned."""
        with counting(len(prompts), "prompts", "continuations") as count:

            def work(name: str) -> list[dict[str, Any]]:
                place = int(name.rpartition(" ")[2])
                one, folder = PromptSet(prompts.items[place : place + 1]), self.outputs / "continuations"
                found = continue_prompts(
                    self.target, one, self.sampling, max_new_tokens, seed + place, folder, count, self.report_cost
                )
                return [asdict(continuation) for continuation in found]

            asked = [prompts.digest, [item.id for item in prompts], self.sampling.to_dict(), max_new_tokens, seed]
            identity = digest([self.target.digest, *asked, machine(self.target)])[:16]
            names = [f"continuations {identity} {place}" for place in range(len(prompts))]
            rows = dict(self.pool.share_all(names, work))
        every = (Continuation.from_dict(row) for name in names for row in rows[name])
        continuations = tuple(text for text in every if text.starts > 0 and text.limit(0) > 0)
        if not continuations:
            say("scan: every continuation ends at once; there is nothing to scan")
            return None
        try:
            depth = max(space.values(method, "num_speculative_tokens")[1] for method in space.scanned)
            return make_scanner(self.target, continuations, self.sampling, depth)
        except UnsupportedModel as error:
            say(f"scan: {error}")
            return None

    def cost_profile(self, continuations: Sequence[Continuation], longest: int, formats: Sequence[str] = ()) -> CostProfile:
        """Return the stored cost profile at the mean context of continuations, or measure it if there is no whole one."""
        context = mean_context(continuations)
        identity = {
            "target": self.target.digest,
            "context": context,
            "longest": longest,
            "formats": list(formats),
            "sampling": self.sampling.to_dict(),
            "machine": machine(self.target),
            "recipe": _PROFILE_VERSION,
        }
        name = digest(identity)[:16]
        file = self.outputs / "profiles" / f"{name}.json"

        def measure() -> dict[str, Any]:
            with exclusive(file):  # two at the same time would disturb each other
                stored: dict[str, Any] = read_json(file) or {"repeats": 0, "seconds": 0.0}
                earlier, start = stored["seconds"], time.monotonic()
                if stored["repeats"] < PROFILE_REPEATS and not (stored["repeats"] and self.is_over()):
                    with counting(PROFILE_REPEATS + 1, "repeats", "cost profile") as count:
                        profile = profile_costs(
                            self.target, context, longest, self.sampling, PROFILE_REPEATS, count, self.is_over, formats
                        )
                    seconds = earlier + time.monotonic() - start
                    done = min(PROFILE_REPEATS, MIN_REPEATS) if self.is_over() else PROFILE_REPEATS
                    stored = {"asked": identity, "profile": profile.to_dict(), "seconds": seconds, "repeats": done}
                    write_json(file, stored)
            self.report_cost(f"profile {name}", stored["seconds"], stored["seconds"] - earlier)
            return stored

        return CostProfile.from_dict(self.pool.share(f"profile {name}", measure)["profile"])


def make_scanner(target: Target, continuations: Sequence[Continuation], sampling: Sampling, depth: int) -> Scanner | None:
    """Return a scanner with as many rows per pass as memory allows; print a line and return None if it allows too few."""
    rows = _CPU_ROWS if target.device.type == "cpu" else _GPU_ROWS

    def checked_scanner() -> Scanner:
        scanner = Scanner(target, continuations, sampling, depth, rows, _TEXT_BYTES)
        scanner.check()
        scanner.scan([DraftPlan.none(target.layers)] * masks_at_once(rows), depth=2)
        return scanner

    while (scanner := within_memory(checked_scanner)) is None:
        fewer = rows // 2 if rows > _MIN_ROWS else 0
        say(f"scan: out of memory with {rows} rows in a pass; {f'trying {fewer}' if fewer else 'nothing is scanned'}")
        if not fewer:
            return None
        rows = fewer
    if (held := len(scanner.continuations)) < len(continuations):
        say(f"scan: {_TEXT_BYTES} bytes hold {held} of {len(continuations)} continuations")
    return scanner
