"""What is learnt before the first trial: the target's own continuations, what everything costs, and an oracle over both.

All of it is kept: continuations and cost profiles in the outputs folder for every study, scans in the study's own folder.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from layerskip import PromptSet, Sampling, SkipMask, StopRule, Target, UnsupportedModel
from layerskip.costs.cost_model import CostProfile
from layerskip.costs.profile import profile_costs
from layerskip.device.memory import out_of_memory, release
from layerskip.files import digest, write_json
from layerskip.models.environment import machine
from layerskip.scan.scan import Scanner
from layerskip.texts.continuations import Continuation, OnUse, continue_prompts
from searches.app.checks import InputError, check_flag, check_list, check_number, check_whole
from searches.app.file_lock import exclusive
from searches.predict.oracle import Choices
from searches.predict.proposals import ProposalSettings
from searches.predict.scan_oracle import ScanOracle, masks_at_once
from searches.space.search_space import SearchSpace

_CONTEXT_STEP = 64
"""Contexts are rounded to it, so that like prompt sets share a profile."""
_RECIPE = 2  # of counts; what another counted is scanned anew
_PROFILED = 2  # of what is kept of a profile; earlier ones did not say what they took
_LEAST_ROWS = 16  # below them scanning is no faster than decoding


@dataclass(frozen=True)
class ScanSettings:
    """How much is foretold.

    Args:
        enabled: whether anything is.
        prompts: tune prompts whose continuations are scanned, others with another seed; None takes all.
        screened_rows: positions of them that the first question about a mask is answered from.
        max_rows: rows per pass, which bounds the memory of a scan; None takes 256 on a CPU and 2048 elsewhere.
        text_bytes: which the target's own states of the continuations may take; what it holds, and the first, are scanned.
            Passes hold the keys and values among them once more.
        thresholds: of the stop rules ``threshold`` and ``adaptive``, tried with every scanned mask.
        profile_repeats: how often every part of a round is timed.
        profile_error: it goes on, up to four times as often, while a median's standard error is more than this share of it.
        proposals: how many masks are asked about, scanned and enqueued.
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
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise InputError(f"scan.thresholds: {value!r} is not a number from 0 to 1")

    def rows(self, device: torch.device) -> int:
        """Rows per pass on a device, if its memory holds them."""
        return self.max_rows or (256 if device.type == "cpu" else 2048)


def prepare_oracle(
    target: Target,
    prompts: PromptSet,
    sampling: Sampling,
    max_new_tokens: int,
    space: SearchSpace,
    settings: ScanSettings,
    outputs: Path,
    folder: Path,
    seed: int,
    on_use: OnUse = lambda *_: None,
) -> ScanOracle | None:
    """An oracle for a study; None, said in a line, for a model that decodes but cannot be scanned.

    Args:
        outputs: continuations and profiles are kept in it.
        folder: scans are kept in it.
        on_use: hears of the continuations and of the profile.
    """
    scanner = open_scanner(target, prompts, sampling, max_new_tokens, space, settings, outputs, seed, on_use)
    if scanner is None:
        return None
    depth, continuations = scanner.depth, scanner.continuations
    longest = max(depth, space.lookup_length[1]) if "prompt_lookup" in space.arms else depth
    parts = space.bridged, scanner.runners > 0
    profile = cost_profile(target, continuations, longest, sampling, settings, outputs, *parts, on_use=on_use)
    stops = scanned_stops(space, settings.thresholds)
    asked = {
        "target": target.digest,
        "continuations": [dataclasses.astuple(continuation) for continuation in continuations],
        "sampling": sampling.to_dict(),
        "choices": [list(space.skip_length), [stop.to_dict() for stop in stops], scanner.runners],
        "screened_rows": settings.screened_rows,
        "machine": machine(target),  # another one may round near-ties otherwise, and takes other times
        "recipe": _RECIPE,
    }
    kept = folder / f"scans-{digest(asked)[:16]}"
    choices = Choices((space.skip_length[0], space.skip_length[1]), stops, tuple(range(scanner.runners + 1)))
    return ScanOracle(scanner, scanner.sample(settings.screened_rows), profile, choices, kept)


def open_scanner(
    target: Target,
    prompts: PromptSet,
    sampling: Sampling,
    max_new_tokens: int,
    space: SearchSpace,
    settings: ScanSettings,
    outputs: Path,
    seed: int,
    on_use: OnUse = lambda *_: None,
) -> Scanner | None:
    """A scanner of the target's continuations of prompts; None, said in a line, for a model that cannot be scanned.

    Args:
        outputs: continuations are kept in it.
        on_use: hears of them.
    """
    with tqdm(total=len(prompts), unit="prompt", desc="continuations", disable=None) as bar:
        kept = outputs / "continuations"
        continuations = continue_prompts(target, prompts, sampling, max_new_tokens, seed, kept, bar.update, on_use)
    continuations = tuple(
        continuation for continuation in continuations if continuation.starts > 0 and continuation.limit(0) > 0
    )
    if not continuations:
        print("scan: every continuation ends at once; there is nothing to scan")
        return None
    try:
        return make_scanner(target, continuations, sampling, space.skip_length[1], space.siblings, settings)
    except UnsupportedModel as error:
        print(f"scan: {error}")
        return None


def make_scanner(
    target: Target,
    continuations: Sequence[Continuation],
    sampling: Sampling,
    depth: int,
    siblings: int,
    settings: ScanSettings,
) -> Scanner | None:
    """A scanner with as many rows per pass as there is memory for; None, said in a line, where there is for none.

    Args:
        depth: drafted tokens that it scans.
        siblings: beside each of them, at most.

    Raises:
        UnsupportedModel: it cannot be scanned.
    """
    rows = settings.rows(target.device)
    while True:
        try:
            scanner = _checked(Scanner(target, continuations, sampling, depth, rows, siblings, settings.text_bytes))
            break
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
        release()
        fewer = rows // 2 if rows > _LEAST_ROWS else 0
        print(f"scan: out of memory with scan.max_rows={rows}; {f'{fewer} are tried' if fewer else 'nothing is scanned'}")
        if not fewer:
            return None
        rows = fewer
    if len(scanner.continuations) < len(continuations):
        print(
            f"scan: scan.text_bytes={settings.text_bytes} holds {len(scanner.continuations)} of {len(continuations)} continuations"
        )
    return scanner


def _checked(scanner: Scanner) -> Scanner:
    """A scanner that sees what decoding does, and whose longest passes fit."""
    scanner.check()
    # What skips the first layer takes nothing over from the target.
    scanner.scan([SkipMask.of(scanner.target.layers, {0}, set())] * masks_at_once(scanner.max_rows), depth=2)
    return scanner


def scanned_stops(space: SearchSpace, thresholds: Sequence[float]) -> tuple[StopRule, ...]:
    """The stop rules that every scanned mask is tried with."""
    kinds = [kind for kind in ("threshold", "adaptive") if kind in space.stops]
    without = [StopRule()] if "length" in space.stops else []
    return (*without, *(StopRule(kind, value) for kind in kinds for value in dict.fromkeys(map(float, thresholds))))


def cost_profile(
    target: Target,
    continuations: Sequence[Continuation],
    longest: int,
    sampling: Sampling,
    settings: ScanSettings,
    outputs: Path,
    bridged: bool = False,
    branching: bool = False,
    on_use: OnUse = lambda *_: None,
) -> CostProfile:
    """The profile of a target at the context that continuations have, measured unless it is kept in the outputs folder.

    ``on_use`` hears of it. Other arguments are those of :func:`~layerskip.costs.profile.profile_costs`.
    """
    repeats, error = settings.profile_repeats, float(settings.profile_error)
    mean = statistics.fmean(len(continuation.prompt) + len(continuation.tokens) / 2 for continuation in continuations)
    context = _CONTEXT_STEP * max(1, round(mean / _CONTEXT_STEP))
    asked = {
        "target": target.digest,
        "context": context,
        "longest": longest,
        "repeats": repeats,
        "error": error,
        "parts": [field.name for field in dataclasses.fields(CostProfile)],  # earlier profiles knew other parts
        "sampling": sampling.to_dict(),
        "machine": machine(target),
        "bridged": bridged,
        "branching": branching,
        "recipe": _PROFILED,
    }
    name = digest(asked)[:16]
    file = outputs / "profiles" / f"{name}.json"
    with exclusive(file):  # two at once would time each other
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            on_use(f"profile {name}", float(kept["seconds"]), 0.0)
            return CostProfile.from_dict(kept["profile"])
        start = time.monotonic()
        with tqdm(total=repeats + 1, unit="repeat", desc="cost profile", disable=None) as bar:
            profile = profile_costs(
                target,
                context,
                longest,
                sampling,
                repeats,
                error,
                on_repeat=bar.update,
                bridged=bridged,
                branching=branching,
            )
        seconds = time.monotonic() - start
        write_json(file, {"asked": asked, "profile": profile.to_dict(), "seconds": seconds})
    on_use(f"profile {name}", seconds, seconds)
    return profile
