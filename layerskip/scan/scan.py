"""What would a mask do in the real decoder? Known from a few passes over the target's own text, with nothing generated.

Lossless decoding gives the target's own tokens, so drafting can start from every position of a known continuation at once:
each start is a row of its own (:mod:`layerskip.scan.row_model`) that sees the target's states before it and its own draft's behind.
One pass gives every start its next drafted token; only starts that agreed so far need the next pass. The runs of agreement
and the draft's confidences then give the rounds of every draft length and stop rule (:mod:`layerskip.scan.replay`): exactly for
greedy decoding, as expected values where tokens are sampled. A start whose draft goes on behind its first wrong token, which
only confidence can end, is followed further when a replay asks for it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from layerskip.config import StopRule
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stats import Round
from layerskip.decoding.stopping import Stopper
from layerskip.mask import SkipMask
from layerskip.models.bridge import Bridges
from layerskip.models.target import Target
from layerskip.scan.layer_similarity import similar_masks
from layerskip.scan.parallel_drafts import ManyDrafts
from layerskip.scan.replay import Counts, count, expect, replay
from layerskip.scan.row_model import RowModel
from layerskip.scan.text_batch import Pack, Start, Texts
from layerskip.scan.trace import CHAIN, Branching, Trace
from layerskip.texts.continuations import Continuation

_MARGIN = 0.1
"""An adaptive threshold moves: its drafts are followed somewhat further than where it stands."""

_CHECKED = 8
"""Starts that the self-check looks at."""


def floor_of(stops: Iterable[StopRule]) -> float | None:
    """The lowest confidence that rules ask for, one that adapts below where it begins; None where none asks.

    What :meth:`Scanner.scan` was not told to follow is followed in passes of its own, over few rows each.
    """
    asked = (stop.threshold - _MARGIN * (stop.kind == "adaptive") for stop in stops if stop.kind != "length")
    return min(asked, default=None)


@dataclass(frozen=True, eq=False)
class Scan:
    """One mask on all continuations: a trace for each.

    Args:
        mask: what the draft skips.
        traces: of its drafts.
        bridges: what stands in for it, if anything does.
        tokens: ``[v]`` int64: those that are drafted beside what was said before; None for all.

    Raises:
        ConfigError: the bridges are of another mask.
    """

    mask: SkipMask
    traces: tuple[Trace, ...]
    bridges: Bridges | None = None
    tokens: Tensor | None = None

    def __post_init__(self) -> None:
        if self.bridges is not None:
            self.bridges.check(self.mask)

    @property
    def agreement(self) -> float:
        """How often the first drafted token is the target's; the expected acceptance where tokens are sampled."""
        firsts = np.concatenate([trace.kept[:, 0] for trace in self.traces])
        return float(np.nanmean(firsts)) if len(firsts) else 0.0


class Scanner:
    """Scans masks over continuations.

    Args:
        target: the model that the continuations are from.
        continuations: its continuations, as :func:`~layerskip.texts.continuations.continue_prompts` gives them.
        sampling: how they were chosen.
        depth: the longest draft to look at.
        max_rows: rows per pass, hence what bounds memory: a pass holds ``[max_rows, V]`` logits and a mask over
            the keys that they see; the one cache that all passes share has room for ``max_rows * depth`` positions behind
            the continuations of as many starts.
        runners: so many runners-up of every drafted token are looked at, which siblings are; nothing is known of siblings
            where tokens are sampled.
        most_bytes: bounds what lies beside it: the target's own keys and values of the continuations, and what every layer was
            handed at their continuations. Passages behind those that it holds are left out; None leaves out none.

    Raises:
        UnsupportedModel: the model's sub-layers cannot be skipped, or rows cannot be told apart in its attention.
    """

    def __init__(
        self,
        target: Target,
        continuations: Sequence[Continuation],
        sampling: Sampling,
        depth: int = 8,
        max_rows: int = 256,
        runners: int = 0,
        most_bytes: int | None = None,
    ) -> None:
        if depth < 1 or max_rows < 1:
            raise ValueError(f"depth, max_rows: {depth}, {max_rows} are not at least 1")
        self.target, self.sampling = target, sampling
        self.depth, self.max_rows = depth, max_rows
        self.runners = runners if sampling.greedy else 0
        model, vocabulary = RowModel(target.model), target.vocabulary
        self._texts = Texts(model, vocabulary, tuple(continuations), sampling, enters=True, most_bytes=most_bytes)
        self.continuations = self._texts.continuations
        every = [
            (p, s)
            for p, continuation in enumerate(self.continuations)
            for s in range(continuation.starts)
            if continuation.limit(s) > 0
        ]
        self._packs = self._packed(every)
        self._drafts = ManyDrafts(self._texts, self.runners, self._packs[0] if self._packs else None)

    @property
    def cache_bytes(self) -> int:
        """What the one cache of all passes takes so far."""
        return self._texts.cache_bytes

    @property
    def text_bytes(self) -> int:
        """What the target's own states of the continuations take."""
        return sum(text.nbytes for text in self._texts.texts)

    def sample(self, rows: int) -> Scanner:
        """A scanner of about so many starts, evenly spread over all continuations: enough to know agreement by, not rounds."""
        every = [row for pack in self._packs for row in pack.rows]
        chosen = every[:: max(1, -(-len(every) // rows))]
        sampled = copy.copy(self)
        sampled._packs = self._packed(chosen)
        return sampled

    def _packed(self, starts: list[Start]) -> list[Pack]:
        parts = [starts[i : i + self.max_rows] for i in range(0, len(starts), self.max_rows)]
        return [self._texts.pack(part, max(1, self.max_rows // len(part)) * len(part) * self.depth) for part in parts]

    @torch.inference_mode()
    def similar_masks(self, skippable: Collection[int], most: int) -> list[SkipMask]:
        """What :mod:`layerskip.scan.layer_similarity` leaves out, for every number of layers up to ``most``, by the first pack's rows."""
        pack = self._packs[0]
        tokens = self._texts.tokens(pack.rows)
        number = torch.arange(len(pack.rows), device=self.target.device)
        visible, positions = self._texts.visible(pack, pack.rows, number, [], 0)
        layers, states = self._texts.model.layers_alone(tokens, positions, self._texts.lay(pack), visible)
        return similar_masks(layers, states, skippable, most)

    def check(self) -> None:
        """Make sure that rows see what decoding does: a draft that skips nothing must be as sure as the target is.

        Raises:
            UnsupportedModel: it is not.
        """
        (scan,) = self.sample(_CHECKED).scan([SkipMask.none(self.target.layers)], depth=2)
        slack = 1e-3 if self.target.dtype == "float32" else 0.1
        for text, trace in zip(self._texts.texts, scan.traces, strict=True):
            for place in range(trace.depth):
                found = trace.confidence[: trace.confidence.shape[0] - place, place]
                expected = text.confidence[1 + place :]
                looked = ~np.isnan(found)
                if not np.allclose(found[looked], expected[looked], rtol=slack, atol=slack):
                    raise self._texts.model.refusal("a draft that skips nothing is not what the model itself says")

    @torch.inference_mode()
    def scan(
        self,
        masks: Sequence[SkipMask],
        depth: int | None = None,
        floor: float | None = None,
        bridges: Sequence[Bridges | None] | None = None,
        tokens: Tensor | None = None,
    ) -> list[Scan]:
        """Scan masks, as many at once as ``max_rows`` allows.

        Args:
            masks: for the target's number of layers.
            depth: of the drafts; the scanner's where None.
            floor: greedy drafts are followed behind their first wrong token while they are at least so sure, as the lowest
                threshold that will be asked about wants it; in passes that run anyway, that costs less than later.
            bridges: of each mask; None for none at all.
            tokens: ``[v]`` int64: those that are drafted beside what was said before; None for all.
        """
        if not self.sampling.greedy:
            floor = None
        depth = self.depth if depth is None else min(depth, self.depth)
        scans = [
            Scan(mask, tuple(Trace.empty(p.starts, depth, self.runners) for p in self.continuations), own, tokens)
            for mask, own in zip(masks, [None] * len(masks) if bridges is None else bridges, strict=True)
        ]
        for pack in self._packs:
            at_once = max(1, self.max_rows // len(pack.rows))
            for first in range(0, len(scans), at_once):
                some = scans[first : first + at_once]
                rows = [(m, p, s) for m in range(len(some)) for p, s in pack.rows]
                for (m, p, s), place, drafted in self._drafts.of(pack, *_makes(some), rows, depth, floor):
                    trace = some[m].traces[p]
                    trace.saw(s, place, drafted.confidence, drafted.likely)
                    if trace.agreed[s] == place or not self.sampling.greedy:
                        trace.judged(s, place, drafted.kept, drafted.rank)
        return scans

    def counts(
        self, scan: Scan, draft_length: int, stop: StopRule, branching: Branching = CHAIN, warmed: bool = False
    ) -> list[Counts]:
        """What decoding every continuation with a scanned mask takes, continuation by continuation; an adaptive stop rule carries on.

        Args:
            scan: as :meth:`scan` gave it; learns what a stop rule asks further.
            draft_length: at most the scan's depth.
            stop: when drafts end earlier.
            branching: siblings beside the drafted tokens.
            warmed: as :meth:`rounds` has it; of sampled tokens it changes nothing.
        """
        if not self.sampling.greedy:
            if branching.siblings:
                raise ValueError("siblings: are known for greedy decoding only")
            return [expect(p, trace, draft_length, stop) for p, trace in zip(self.continuations, scan.traces, strict=True)]
        return [count(rounds) for rounds in self.rounds(scan, draft_length, stop, branching, warmed)]

    def rounds(
        self, scan: Scan, draft_length: int, stop: StopRule, branching: Branching = CHAIN, warmed: bool = False
    ) -> list[list[Round]]:
        """The rounds of greedy decoding, continuation by continuation, as :func:`~layerskip.scan.replay.replay` gives them.

        Args:
            warmed: whether a stop rule that carries on from prompt to prompt has gone through all continuations before, as one
                that has been in use; else it begins with the first.

        Raises:
            ValueError: tokens are sampled, or the draft length is beyond the scan's depth.
        """
        if not self.sampling.greedy:
            raise ValueError("sampling: single rounds are known for greedy decoding only")
        if any(trace.depth < draft_length for trace in scan.traces):
            raise ValueError(f"draft_length: {draft_length} is beyond the scan's depth")
        followed: set[tuple[int, int, float]] = set()
        turns = 2 if warmed and stop.kind == "adaptive" and stop.carry else 1
        while True:
            stopper = Stopper(stop)
            found, missing, floor = list[list[Round]](), set(), 1.0
            for index, continuation in [*enumerate(self.continuations)] * turns:
                stopper.start()
                open_starts: dict[int, float] = {}
                found.append(replay(continuation, scan.traces[index], draft_length, stopper, open_starts, branching))
                missing |= {(index, start) for start in open_starts}
                floor = min([floor, *open_starts.values()])
            if not missing:
                return found[-len(self.continuations) :]
            floor -= _MARGIN * (stop.kind == "adaptive")
            asked = {(*start, floor) for start in missing}
            if asked <= followed:
                raise RuntimeError(f"scan: drafts from {sorted(missing)} cannot be followed")
            followed |= asked
            self._follow(scan, missing, floor)

    @torch.inference_mode()
    def _follow(self, scan: Scan, starts: Collection[Start], floor: float) -> None:
        """Follow some drafts behind their first wrong token, as long as they are at least so sure of themselves."""
        for pack in self._packs:
            rows = [(0, p, s) for p, s in pack.rows if (p, s) in starts]
            if rows:
                drafts = self._drafts.of(pack, *_makes([scan]), rows, scan.traces[0].depth, floor, wrong=True)
                for (_, p, s), place, drafted in drafts:
                    scan.traces[p].saw(s, place, drafted.confidence, drafted.likely)


def _makes(scans: Sequence[Scan]) -> tuple[list[SkipMask], list[Bridges | None], Tensor | None]:
    """What drafts: masks, their bridges, and the tokens, which are the same for all."""
    return [scan.mask for scan in scans], [scan.bridges for scan in scans], scans[0].tokens
