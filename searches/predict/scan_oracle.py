"""How fast would a mask decode? Foretold from a scan and a cost profile, before anything is decoded with it.

Foretelling is cheap, not free: what was foretold is kept in a file, mask by mask, so that a search that was interrupted asks
nothing twice.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np

from layerskip import SkipMask, SpeculativeConfig, StopRule
from layerskip.costs.cost_model import Aids, CostProfile
from layerskip.drafters.prompt_lookup import PromptLookup
from layerskip.files import digest
from layerskip.models.bridge import load_bridges
from layerskip.scan.replay import Counts, count, replay_lookup
from layerskip.scan.scan import Scan, Scanner
from layerskip.scan.trace import Branching
from searches.app.resume_log import ResultLog
from searches.predict.bridged_drafts import BridgedDrafts
from searches.predict.oracle import Choice, Choices, Prediction
from searches.predict.stability import Stability, stability
from searches.space.bridge_spec import BridgeSpec
from searches.training.bridge_store import BridgeStore, about

_ROWS = 256  # of a pass that is worth sharing
_REMEMBERED = 64  # scans whose traces are at hand when another stop rule is asked about


class ScanOracle:
    """Foretells by scanning.

    Args:
        scanner: over the tune prompts' continuations.
        screen: over few of their positions, for the cheap question.
        profile: of the same target.
        choices: what masks may be combined with.
        folder: keeps what was foretold; belongs to one target, prompt set and choice of lengths and stop rules.
        bridge_spec: how every mask drafts.
        bridge_store: where bridges and draft heads come from, if the bridge_spec asks for any.
    """

    def __init__(
        self,
        scanner: Scanner,
        screen: Scanner,
        profile: CostProfile,
        choices: Choices,
        folder: Path,
        bridge_spec: BridgeSpec | None = None,
        bridge_store: BridgeStore | None = None,
    ) -> None:
        self.bridge_spec = bridge_spec or BridgeSpec()
        self._made_up = BridgedDrafts(self.bridge_spec, bridge_store)
        self._folder = folder
        self._scanner, self._screen, self._profile, self._choices = scanner, screen, profile, choices
        self._agreements = ResultLog(folder / "agreements.jsonl")
        self._counts = ResultLog(folder / "counts.jsonl")
        self._others = ResultLog(folder / "others.jsonl")
        self._similar = ResultLog(folder / "similar.jsonl")
        self._trained = ResultLog(folder / "trained.jsonl")
        self._scans: dict[SkipMask, Scan] = {}
        self.screening_seconds = 0.0  # of this process, for masks' first tokens

    @property
    def scan_seconds(self) -> float | None:
        """What scanning a mask whole took on average, earlier runs included; None before any was."""
        found = [self._counts[text]["seconds"] for text in self._counts]
        return statistics.fmean(found) if found else None

    @property
    def max_rows(self) -> int:
        """What bounds a scan's memory."""
        return self._scanner.max_rows

    @property
    def layers(self) -> int:
        """The target's."""
        return self._scanner.target.layers

    @property
    def prompts(self) -> frozenset[str]:
        """Those that have a continuation to scan."""
        return frozenset(continuation.prompt_id for continuation in self._scanner.continuations)

    @property
    def profile(self) -> CostProfile:
        """The measured one."""
        return self._profile

    def agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        """One pass over the screen's positions for each mask that was not asked about before."""
        for some in self._portions(self._new(masks, self._agreements)):
            start = time.monotonic()
            for scan in self._made_up.scan(self._screen, some, depth=1):
                self._agreements.add(scan.mask.format(), scan.agreement, self._made_up.lasting(scan.mask))
            self.screening_seconds += time.monotonic() - start
        return [float(self._agreements[mask.format()]) for mask in masks]

    def predict(self, masks: Iterable[SkipMask]) -> list[Prediction]:
        """Scan each mask that was not scanned before, and choose the best draft length and stop rule for it."""
        masks = list(masks)
        self._scan(masks)
        return [self._best(mask) for mask in masks]

    def foretells(self, config: SpeculativeConfig) -> bool:
        """Prompt lookups whose verification was timed, and layer skipping up to the depth and the siblings of scans.

        Not with an adaptive stop rule where tokens are sampled: replays hold its threshold, which decoding moves.
        """
        longest = {"prompt_lookup": self._profile.longest, "layer_skip": min(self._scanner.depth, self._profile.longest)}
        if config.kind == "layer_skip" and not (self.knows(config) and config.siblings <= self._scanner.runners):
            return False
        if config.stop.kind == "adaptive" and not self._scanner.sampling.greedy:
            return False
        verified = config.draft_length * (1 + config.siblings)
        return config.lossless and config.draft_length <= longest.get(config.kind, 0) and verified <= self._profile.longest

    def speedup(self, config: SpeculativeConfig) -> float:
        """Count a configuration's rounds; its mask is scanned unless it was."""
        if config.kind == "prompt_lookup":
            drafter = PromptLookup(config.ngram_min, config.ngram_max, config.match, config.draft_length)
            counts = _sum(count(replay_lookup(continuation, drafter)) for continuation in self._scanner.continuations)
            return self._profile.lookup_speedup(counts)
        mask = SkipMask.parse(config.mask, self.layers)
        known = self._read(self._counts[mask.format()]["counts"]) if mask.format() in self._counts else {}
        choice = config.draft_length, config.stop, Branching(config.siblings, config.least_probability)
        counts = known[choice] if choice in known else self._count(mask, *choice)
        return self._profile.speedup(counts, mask, config.stop, self.aids(mask), choice[2])

    def aids(self, mask: SkipMask) -> Aids:
        """Those of the bridge_spec."""
        return self._made_up.aids(mask)

    def knows(self, config: SpeculativeConfig) -> bool:
        """Whether a self-draft's bridges and draft head are those of the bridge_spec."""
        return self._made_up.fits(config)

    def suited(self, config: SpeculativeConfig) -> SpeculativeConfig:
        """A configuration with the draft length, stop rule and siblings that suit it best, its own ones among them.

        Args:
            config: one that :meth:`foretells` affirms, whose bridges may have been trained since.
        """
        mask, folder = SkipMask.parse(config.mask, self.layers), Path(config.bridge)
        own = config.draft_length, config.stop, Branching(config.siblings, config.least_probability)
        bridges = load_bridges(folder, self._scanner.target, mask)
        name = digest([folder.name, about(folder), config.draft_length, config.stop.to_dict(), astuple(own[2])])
        if name not in self._trained:
            (scan,) = self._scanner.scan([mask], bridges=[bridges], tokens=self._made_up.tokens)
            self._trained.add(name, [self._counted(scan), _sum(self._scanner.counts(scan, *own, warmed=True)).to_list()])
        others, counts = self._trained[name]
        found = self._read(others) | {own: Counts.from_list(counts)}
        (length, stop, branching), _ = self._fastest(found, mask, self._made_up.trained_aids(bridges))
        siblings, least = astuple(branching)
        return replace(config, draft_length=length, stop=stop, siblings=siblings, least_probability=least)

    def bridged(self, bridge_spec: BridgeSpec, bridge_store: BridgeStore) -> ScanOracle:
        """The same for masks that draft otherwise; texts and passes are shared."""
        bridge = f"{bridge_spec.bridge}{bridge_spec.width or ''}"
        folder = self._folder / f"{bridge}-{bridge_spec.rank}-{bridge_spec.tokens}-{bridge_store.digest[:12]}"
        return ScanOracle(self._scanner, self._screen, self._profile, self._choices, folder, bridge_spec, bridge_store)

    def _count(self, mask: SkipMask, draft_length: int, stop: StopRule, branching: Branching) -> Counts:
        """The counts of one choice beside those that every mask is tried with."""
        name = json.dumps([mask.format(), draft_length, stop.to_dict(), *astuple(branching)])
        if name not in self._others:
            if mask not in self._scans:
                (self._scans[mask],) = self._made_up.scan(self._scanner, [mask])
                self._forget()
            counts = self._scanner.counts(self._scans[mask], draft_length, stop, branching, warmed=True)
            self._others.add(name, _sum(counts).to_list(), self._made_up.lasting(mask))
        return Counts.from_list(self._others[name])

    def _forget(self) -> None:
        while len(self._scans) > _REMEMBERED:
            del self._scans[next(iter(self._scans))]

    def single_agreements(self) -> np.ndarray:
        """``[2, L]``: agreement with one attention or one MLP sub-layer skipped; NaN where nobody asked."""
        found = np.full((2, self.layers), np.nan)
        for row, kind in enumerate(("attention", "mlp")):
            for layer in range(self.layers):
                if f"{kind}:{layer}" in self._agreements:
                    found[row, layer] = self._agreements[f"{kind}:{layer}"]
        return found

    def _scanned_masks(self) -> list[SkipMask]:
        """Those that skip anything."""
        return [mask for text in self._counts if (mask := SkipMask.parse(text, self.layers)).skipped]

    def foremost(self) -> SkipMask | None:
        """The mask that is foretold to be fastest of those scanned so far that skip anything."""
        return max(self._scanned_masks(), key=lambda mask: self._best(mask).speedup, default=None)

    def stability(self, sublayers: int) -> Stability | None:
        """How the choice among the masks scanned so far depends on the prompts; None before any was scanned."""
        masks = self._scanned_masks()
        if not masks:
            return None
        seconds, baseline = [], []
        for mask in masks:
            best = self._best(mask).config
            branching = Branching(best.siblings)
            counts = self._parts(self._counts[mask.format()]["counts"])[best.draft_length, best.stop, branching]
            seconds.append([self._profile.seconds(part, mask, best.stop, self.aids(mask), branching) for part in counts])
            baseline = [part.tokens * self._profile.verify_seconds[0] for part in counts]
        return stability(masks, np.array(seconds), np.array(baseline), sublayers)

    def similar_masks(self, skippable: Collection[int]) -> list[SkipMask]:
        """Masks of whole layers whose hidden states end up closest to the whole model's, up to half of them."""
        name = str(sorted(skippable))
        if name not in self._similar:
            found = self._screen.similar_masks(skippable, len(skippable) // 2)
            self._similar.add(name, [mask.format() for mask in found])
        return [SkipMask.parse(text, self.layers) for text in self._similar[name]]

    def _scan(self, masks: Sequence[SkipMask]) -> None:
        for some in self._portions(self._new(masks, self._counts)):
            start = time.monotonic()
            scans = self._made_up.scan(self._scanner, some, floor=self._choices.floor)
            seconds = (time.monotonic() - start) / len(some)
            for scan in scans:
                start = time.monotonic()
                found = self._counted(scan)
                self._scans[scan.mask] = scan
                self._forget()
                seconds_in_all = seconds + time.monotonic() - start
                kept = {"agreement": scan.agreement, "counts": found, "seconds": seconds_in_all}
                self._counts.add(scan.mask.format(), kept, self._made_up.lasting(scan.mask))

    def _counted(self, scan: Scan) -> list[list[Any]]:
        """Of every choice: draft length, number of its stop rule, siblings, and the counts of each continuation."""
        found = []
        for rule, (length, stop, branching) in self._choices.every(self._scanner.depth, self._profile.longest):
            counts = self._scanner.counts(scan, length, stop, branching, warmed=True)  # as in a trial
            found.append([length, rule, branching.siblings, [each.to_list() for each in counts]])
        return found

    def _portions(self, masks: list[SkipMask]) -> Iterator[list[SkipMask]]:
        """Masks that are scanned together: several where passes have room for many rows, which a CPU gains nothing by."""
        at_once = masks_at_once(self._scanner.max_rows)
        for first in range(0, len(masks), at_once):
            yield masks[first : first + at_once]

    def _new(self, masks: Sequence[SkipMask], memory: ResultLog) -> list[SkipMask]:
        return [mask for mask in dict.fromkeys(masks) if mask.format() not in memory]

    def _parts(self, counted: Sequence[Sequence[Any]]) -> dict[Choice, list[Counts]]:
        """Of every choice: the counts of each continuation."""
        return {
            (length, self._choices.stops[rule], Branching(siblings)): [Counts.from_list(part) for part in found]
            for length, rule, siblings, found in counted
        }

    def _read(self, counted: Sequence[Sequence[Any]]) -> dict[Choice, Counts]:
        return {choice: _sum(parts) for choice, parts in self._parts(counted).items()}

    def _best(self, mask: SkipMask) -> Prediction:
        known = self._counts[mask.format()]
        (length, stop, branching), speedup = self._fastest(self._read(known["counts"]), mask, self.aids(mask))
        bridge, head = self._made_up.folders(mask)
        config = SpeculativeConfig(
            "layer_skip", length, mask=mask.format(), stop=stop, siblings=branching.siblings, bridge=bridge, draft_head=head
        )
        return Prediction(config, speedup, float(known["agreement"]))

    def _fastest(self, found: Mapping[Choice, Counts], mask: SkipMask, aids: Aids) -> tuple[Choice, float]:
        """The choice that suits a mask best, and what is foretold of it."""
        foretold = {
            choice: self._profile.speedup(counts, mask, choice[1], aids, choice[2]) for choice, counts in found.items()
        }
        return max(foretold.items(), key=lambda pair: pair[1])


def masks_at_once(rows: int) -> int:
    """How many masks are scanned together in passes of so many rows."""
    return max(1, rows // _ROWS)


def _sum(parts: Iterable[Counts]) -> Counts:
    return sum(parts, Counts())
