"""Preparation of a study before its first trial: continuations of the target, a cost profile, and a speedup predictor.

All results are stored: continuations and cost profiles in the outputs folder for all studies, scans in the study's folder.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from layerskip import PromptSet, Sampling, SkipMask, StopRule, Target, UnsupportedModel
from layerskip.costs.cost_model import CostProfile
from layerskip.costs.profile import MIN_REPEATS, profile_costs
from layerskip.device.memory import within_memory
from layerskip.files import digest, read_json, write_json
from layerskip.models.environment import machine
from layerskip.scan.scan import Scanner
from layerskip.texts.continuations import Continuation, ReportCost, continue_prompts
from searches.app.checks import check_flag, check_list, check_number, check_whole
from searches.predict.contexts import timed_contexts
from searches.predict.predictor import DraftChoices
from searches.predict.proposals import ProposalSettings
from searches.predict.scan_predictor import ScanPredictor, masks_at_once
from searches.progress import counting, say
from searches.results import exclusive
from searches.space.search_space import LOOKUP, SearchSpace
from searches.workers.pool import ALONE, Workers

_SCAN_VERSION = 3  # of the counts; those of another version are scanned again
_PROFILE_VERSION = 4  # of stored profiles and their measurement
_MIN_ROWS = 16  # with fewer rows per pass, scanning is no faster than decoding


@dataclass(frozen=True)
class ScanSettings:
    """Amount of prediction before the first trial.

    Args:
        enabled: whether masks are scanned at all.
        prompts: the number of tune prompts whose continuations are scanned, chosen by the seed; None for all.
        screened_rows: the number of their positions on which masks are screened.
        max_rows: rows per pass, which bound the memory of a scan; None for 256 on a CPU and 2048 elsewhere.
        text_bytes: budget for the target's own states of the continuations. Those that fit, and always the first, are
            scanned. Passes hold the keys and values among the states once more.
        thresholds: of the stop rules ``threshold`` and ``adaptive`` that every scanned mask is combined with.
        profile_repeats: how often every part of a round is timed, where the choice of masks depends on it; three times at
            first.
        profile_error: timing then continues, up to twice as often, while the standard error of a median exceeds this
            fraction of it.
        proposals: how many masks are screened, scanned and enqueued.
    """

    enabled: bool = True
    prompts: int | None = 4
    screened_rows: int = 128
    max_rows: int | None = None
    text_bytes: int = 2_000_000_000
    thresholds: Sequence[float] = (0.5, 0.6, 0.7, 0.8, 0.9)
    profile_repeats: int = 12
    profile_error: float = 0.02
    proposals: ProposalSettings = field(default_factory=ProposalSettings)

    def __post_init__(self) -> None:
        for name in ("prompts", "screened_rows", "max_rows", "text_bytes", "profile_repeats"):
            value = getattr(self, name)
            if value is not None or name not in ("prompts", "max_rows"):
                check_whole(f"scan.{name}", value)
        check_number("scan.profile_error", self.profile_error)
        check_flag("scan.enabled", self.enabled)
        check_list("scan.thresholds", self.thresholds, or_empty=False)
        for value in self.thresholds:
            check_number("scan.thresholds", value, 1, or_zero=True)

    def rows(self, device: torch.device) -> int:
        """Return the rows per pass on a device, if its memory suffices."""
        return self.max_rows or (256 if device.type == "cpu" else 2048)


def prepare_predictor(
    target: Target,
    prompts: PromptSet,
    sampling: Sampling,
    max_new_tokens: int,
    space: SearchSpace,
    settings: ScanSettings,
    outputs: Path,
    folder: Path,
    seed: int,
    report_cost: ReportCost = lambda *_: None,
    pool: Workers = ALONE,
    is_over: Callable[[], bool] = lambda: False,
) -> ScanPredictor | None:
    """Prepare the predictor of a study; print a line and return None if the model can decode but not be scanned.

    The costs are measured roughly. :meth:`ScanPredictor.sharpen` measures them well.

    Args:
        target: the target.
        prompts: tune prompts.
        sampling: of the target's tokens.
        max_new_tokens: tokens of a continuation, per turn.
        space: the draft lengths, stop rules and siblings to predict.
        settings: of scanning.
        outputs: folder of continuations and profiles.
        folder: of scans.
        seed: of the continuations.
        report_cost: called with the name and the seconds of every continuation and of the profile.
        pool: the workers that share all of this.
        is_over: returns whether time has run out: nothing more is measured than a rough profile needs.
    """
    scanner = open_scanner(target, prompts, sampling, max_new_tokens, space, settings, outputs, seed, report_cost, pool)
    if scanner is None:
        return None
    depth, continuations = scanner.depth, scanner.continuations
    copied = space.values(LOOKUP, "num_speculative_tokens")[1] if LOOKUP in space.available_methods else 0
    longest = max(depth, copied)
    parts = space.fitted, scanner.runners > 0

    def measure(repeats: int, error: float) -> CostProfile:
        enough = dataclasses.replace(settings, profile_repeats=repeats, profile_error=error)
        return cost_profile(target, continuations, longest, sampling, enough, outputs, *parts, report_cost, pool, is_over)

    profile = measure(min(MIN_REPEATS, settings.profile_repeats), math.inf)
    stops, lengths = scanned_stops(space, settings.thresholds), space.values("layer_skip", "num_speculative_tokens")
    identity = {
        "target": target.digest,
        "continuations": [dataclasses.astuple(continuation) for continuation in continuations],
        "sampling": sampling.to_dict(),
        "choices": [list(lengths), [stop.to_dict() for stop in stops], scanner.runners],
        "screened_rows": settings.screened_rows,
        "machine": machine(target),  # another machine may round near-ties differently, and has other costs
        "recipe": _SCAN_VERSION,
    }
    choices = DraftChoices(lengths, stops, tuple(range(scanner.runners + 1)))
    place = folder / f"scans-{digest(identity)[:16]}"
    sharpen = partial(measure, settings.profile_repeats, settings.profile_error)
    return ScanPredictor(scanner, scanner.sample(settings.screened_rows), profile, choices, place, pool=pool, costs=sharpen)


def open_scanner(
    target: Target,
    prompts: PromptSet,
    sampling: Sampling,
    max_new_tokens: int,
    space: SearchSpace,
    settings: ScanSettings,
    outputs: Path,
    seed: int,
    report_cost: ReportCost = lambda *_: None,
    pool: Workers = ALONE,
) -> Scanner | None:
    """Return a scanner of the target's continuations of prompts; print a line and return None if it cannot be scanned.

    The arguments are those of :func:`prepare_predictor`.
    """
    with counting(len(prompts), "prompts", "continuations") as count:

        def work(name: str) -> list[dict[str, Any]]:
            place = int(name.rpartition(" ")[2])
            one, folder = PromptSet(prompts.items[place : place + 1]), outputs / "continuations"
            found = continue_prompts(target, one, sampling, max_new_tokens, seed + place, folder, count, report_cost)
            return [dataclasses.asdict(continuation) for continuation in found]

        ids = [item.id for item in prompts]
        identity = [target.digest, prompts.digest, ids, sampling.to_dict(), max_new_tokens, seed, machine(target)]
        names = [f"continuations {digest(identity)[:16]} {place}" for place in range(len(prompts))]
        rows = dict(pool.share_all(names, work))
    continuations = tuple(
        continuation
        for name in names
        for continuation in map(Continuation.from_dict, rows[name])
        if continuation.starts > 0 and continuation.limit(0) > 0
    )
    if not continuations:
        say("scan: every continuation ends at once; there is nothing to scan")
        return None
    try:
        depth, siblings = (space.values("layer_skip", name)[1] for name in ("num_speculative_tokens", "siblings"))
        return make_scanner(target, continuations, sampling, depth, siblings, settings)
    except UnsupportedModel as error:
        say(f"scan: {error}")
        return None


def make_scanner(
    target: Target,
    continuations: Sequence[Continuation],
    sampling: Sampling,
    depth: int,
    siblings: int,
    settings: ScanSettings,
) -> Scanner | None:
    """Return a scanner with as many rows per pass as memory allows; print a line and return None if it allows too few.

    Args:
        target: the target.
        continuations: its continuations of prompts.
        sampling: of its tokens.
        depth: the longest draft.
        siblings: the most alternatives to a drafted token.
        settings: of scanning.
    """
    rows = settings.rows(target.device)

    def checked_scanner() -> Scanner:
        """Check that a scanner agrees with decoding, and that its longest passes fit into memory."""
        scanner = Scanner(target, continuations, sampling, depth, rows, siblings, settings.text_bytes)
        scanner.check()
        # A mask that skips the first layer shares no pass with the target.
        scanner.scan([SkipMask.of(target.layers, {0}, set())] * masks_at_once(rows), depth=2)
        return scanner

    while (scanner := within_memory(checked_scanner)) is None:
        fewer = rows // 2 if rows > _MIN_ROWS else 0
        say(f"scan: out of memory with scan.max_rows={rows}; {f'trying {fewer}' if fewer else 'nothing is scanned'}")
        if not fewer:
            return None
        rows = fewer
    if len(scanner.continuations) < len(continuations):
        held = f"{len(scanner.continuations)} of {len(continuations)} continuations"
        say(f"scan: scan.text_bytes={settings.text_bytes} holds {held}")
    return scanner


def scanned_stops(space: SearchSpace, thresholds: Sequence[float]) -> tuple[StopRule, ...]:
    """Return the stop rules that every scanned mask is combined with."""
    searched = space.values("layer_skip", "stop")
    methods = [method for method in ("threshold", "adaptive") if method in searched]
    plain = [StopRule()] if "length" in searched else []
    return (*plain, *(StopRule(method, value) for method in methods for value in dict.fromkeys(map(float, thresholds))))


def cost_profile(
    target: Target,
    continuations: Sequence[Continuation],
    longest: int,
    sampling: Sampling,
    settings: ScanSettings,
    outputs: Path,
    fitted: bool = False,
    branching: bool = False,
    report_cost: ReportCost = lambda *_: None,
    pool: Workers = ALONE,
    is_over: Callable[[], bool] = lambda: False,
) -> CostProfile:
    """Return the cost profile of a target at the contexts of its continuations; measure it if no such one is stored.

    A stored profile will do if it was measured with as many repeats.

    Args:
        target: the target.
        continuations: their lengths give the timed contexts.
        longest: the most drafted tokens whose verification is timed.
        sampling: of the target's tokens.
        settings: the number of repeats and the tolerated error.
        outputs: folder of profiles.
        fitted: whether replacements of sub-layers and draft heads are timed.
        branching: whether trees are timed.
        report_cost: called with the name and the seconds of the profile.
        pool: the workers that share it.
        is_over: returns whether time has run out; then few repeats are enough.
    """
    repeats, error = settings.profile_repeats, float(settings.profile_error)
    contexts = timed_contexts(continuations)
    several = {"contexts": contexts} if len(contexts) > 1 else {}
    identity = several | {
        "target": target.digest,
        "context": contexts[0],
        "longest": longest,
        "sampling": sampling.to_dict(),
        "machine": machine(target),
        "fitted": fitted,
        "branching": branching,
        "recipe": _PROFILE_VERSION,
    }
    name = digest(identity)[:16]
    file = outputs / "profiles" / f"{name}.json"

    def measure() -> dict[str, Any]:
        with exclusive(file):  # two at the same time would disturb each other
            seconds = 0.0
            known: dict[str, Any] | None = read_json(file)
            stored = known or {"repeats": 0}
            if stored["repeats"] < repeats and not (known and is_over()):
                start = time.monotonic()
                with counting((repeats + 1) * len(contexts), "repeats", "cost profile") as count:
                    parts = longest, sampling, repeats, error, count, fitted, branching, is_over
                    profile, *others = (profile_costs(target, context, *parts) for context in contexts)
                profile, seconds = dataclasses.replace(profile, others=tuple(others)), time.monotonic() - start
                taken = stored.get("seconds", 0.0) + seconds
                done = min(repeats, MIN_REPEATS) if is_over() else repeats  # a study with more time measures again
                stored = {"asked": identity, "profile": profile.to_dict(), "seconds": taken, "repeats": done}
                write_json(file, stored)
        report_cost(f"profile {name}", float(stored["seconds"]), seconds)
        return stored

    return CostProfile.from_dict(pool.share(f"profile {name} {repeats}", measure)["profile"])
