"""Drafts from many positions of texts at once. A scan runs one pass per drafted token, over the drafts that still matter.

While a draft agrees with its text, the layers before its first skip compute what the target computed when it read the text.
A pass therefore begins at that layer, with the target's own hidden states, keys and values. Only drafts that contain a wrong
token run these first layers, in a partial pass of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from layerskip.decoding.stopping import confidence, portions
from layerskip.device.memory import is_out_of_memory
from layerskip.device.trial import nearly_equal
from layerskip.drafters.chain import runners_up
from layerskip.mask import SkipMask
from layerskip.scan.text_batch import Start, StartPack, TextBatch, runs_of

Row = tuple[int, int, int]
"""Index of a mask, index of a continuation, and the start in it."""

_CHECKED = 8  # starts in the self-check
_FEW = 32  # a pass takes about as long with fewer rows, because it is bound by reading the weights
_WORTH = 16  # with wrong drafts among the rows, a late begin must save at least the time of this many rows
_HOPELESS = 1e-4  # sampled texts: a start whose draft is reached with a lower probability is left out of deeper passes


class DraftedToken(NamedTuple):
    """A drafted token with its acceptance.

    Args:
        confidence: the draft's probability of its most likely token.
        acceptance: the probability that the token is accepted, given that those before it were.
        runner_probs: the probabilities of the draft's runners-up, descending.
        rank: which runner-up is the target's token; their number for none.
    """

    confidence: float
    acceptance: float
    runner_probs: Sequence[float] = ()
    rank: int = 0


class _Passes:
    def __init__(self, texts: TextBatch, pack: StartPack, masks: Sequence[SkipMask]) -> None:
        self.texts, self.pack, self.masks, self.cache = texts, pack, masks, texts.load(pack)
        self._passes: list[tuple[Tensor, int]] = []  # draft ids of the rows, and their distance from the start

    def run(
        self, live: Sequence[Row], draft_ids: Tensor, tokens: Tensor, place: int, first: int = 0, whole: int = 0
    ) -> Tensor:
        """Run the next pass and return the logits ``[R, V]`` after the rows' tokens.

        Args:
            place: distance of these tokens from the starts.
            first: the layer to begin at. Unless it is 0, the text must have these tokens at these positions.
            whole: number of leading rows that begin at layer 0 all the same, because their tokens are not the text's.
        """
        model, starts, cache = self.texts.model, [(p, s) for _, p, s in live], self.cache
        visible, positions = self.texts.visible(self.pack, starts, draft_ids, self._passes, place)
        mask_ids = torch.tensor([m for m, _, _ in live], device=model.device)
        parts = runs_of([(row < whole, p) for row, (p, _) in enumerate(starts)])
        late, base = None, cache.length
        if first:
            reached = [(p, s + place) for p, s in starts[whole:]]
            hidden = self.texts.layer_input(first, reached)
            if whole:
                narrowed = {id(mask): mask[:whole, : base + whole] for mask in visible}
                whole_parts = [part for part in parts if part[1] <= whole]
                model.prepare([narrowed[id(mask)] for mask in visible], self.masks, mask_ids[:whole], whole_parts)
                hidden = torch.cat((model.states(first, tokens[:whole], positions[:whole], cache), hidden), 1)
            late = first, hidden
            cache.length = base + whole
            # Drafts with a wrong token later attend to these rows in the first layers, too.
            cache.copy_positions(first, self.texts.cache_positions(self.pack, reached))
            cache.length = base
        model.prepare(visible, self.masks, mask_ids, parts)
        logits = model.run(tokens, positions, cache, late)
        self._passes.append((draft_ids, place))
        cache.length += len(live)
        return logits


class ParallelDrafts:
    """A drafter from many starts of texts at once.

    Args:
        runners: the number of runners-up to record for every drafted token of a greedy target.
        pack: a pack of these texts, for the self-check whether passes may begin late; None if there is none.
    """

    def __init__(self, texts: TextBatch, runners: int, pack: StartPack | None) -> None:
        self.texts, self.sampling, self.runners = texts, texts.sampling, runners
        self._late = pack is not None and self._may_begin_late(pack)

    @torch.inference_mode()
    def _may_begin_late(self, pack: StartPack) -> bool:
        """Return whether a pass from the last layer on equals a whole one; some families pass on more than hidden states."""
        layers, starts = self.texts.model.layers, pack.rows[:_CHECKED]
        live, tokens = [(0, *start) for start in starts], self.texts.tokens(starts)
        draft_ids = torch.arange(len(live), device=tokens.device)
        logits = []
        for first in (0, layers - 1):
            passes = _Passes(self.texts, pack, [SkipMask.none(layers)])
            try:
                logits.append(passes.run(live, draft_ids, tokens, 0, first))
            except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
                if first == 0 or is_out_of_memory(error):
                    raise
                return False
            finally:
                passes.cache.length = pack.end
        return nearly_equal(logits[1], logits[0])

    def draft(
        self,
        pack: StartPack,
        masks: Sequence[SkipMask],
        rows: list[Row],
        depth: int,
        floor: float | None,
        only_confident: bool = False,
    ) -> Iterator[tuple[Row, int, DraftedToken]]:
        """Draft from starts of a pack.

        A draft continues while it agrees with the text, and while its confidence is at least ``floor``.

        Args:
            rows: the drafts, at least one for every mask.
            floor: the confidence that keeps a draft going; None for none.
            only_confident: whether agreement alone does not keep a draft going.

        Yields:
            The row, the place in its draft from 0, and the drafted token.
        """
        passes, texts = _Passes(self.texts, pack, masks), self.texts.continuations
        layers = self.texts.model.layers
        skips = (layer for layer in range(layers) if any(mask.attention[layer] or mask.mlp[layer] for mask in masks))
        first = next(skips, layers - 1) if self._late else 0
        chain = self.texts.tokens([(p, s) for _, p, s in rows])[:, None]
        draft_ids = torch.arange(len(rows), device=chain.device)
        reach, right = np.ones(len(rows)), np.ones(len(rows), dtype=bool)
        try:
            for place in range(depth):
                here = draft_ids.tolist()
                if not here:
                    break
                wrong = int((~right[here]).sum())
                begin = first if max(len(here), _FEW) - max(wrong, _FEW) >= _WORTH or not wrong else 0
                whole = wrong if begin else 0
                if whole:  # wrong drafts come first
                    order = np.argsort(right[here], kind="stable").tolist()
                    draft_ids, chain = draft_ids[order], chain[order]
                    here = draft_ids.tolist()
                live = [rows[i] for i in here]
                logits = passes.run(live, draft_ids, chain[:, -1], place, begin, whole)
                drafted, results = self._accept(logits, [(p, s) for _, p, s in live], chain, place)
                for i, row, result in zip(here, live, results, strict=True):
                    reach[i] *= result.acceptance
                    _, p, s = row
                    # Sampled drafts follow the text. Past the last start there are no states of the text.
                    right[i] &= s + place + 1 < texts[p].starts and (result.acceptance == 1.0 or not self.sampling.greedy)
                    yield row, place, result
                going = [
                    place + 1 < texts[p].limit(s)
                    and (
                        (floor is not None and result.confidence >= floor)
                        or (not only_confident and reached > _HOPELESS and s + place + 1 < texts[p].starts)
                    )
                    for (_, p, s), result, reached in zip(live, results, reach[here], strict=True)
                ]
                chosen = torch.tensor(going, device=chain.device)
                draft_ids = draft_ids[chosen]
                chain = torch.cat((chain, drafted[:, None]), 1)[chosen]
        finally:
            passes.cache.length = pack.end

    def _accept(
        self, logits: Tensor, starts: Sequence[Start], chain: Tensor, place: int
    ) -> tuple[Tensor, list[DraftedToken]]:
        """Choose the next token of every draft and compute its acceptance. Sampled drafts continue with the texts' tokens.

        Args:
            chain: ``[n, place + 1]`` int64: the token at the start, then the drafted ones.
            place: index of the next drafted token, from 0.
        """
        seen = None
        if self.sampling.needs_seen:
            prefixes = [self.texts.texts[p].tokens[: self.texts.position((p, s))] for p, s in starts]
            seen = torch.cat([self.texts.seen(torch.cat(parts)) for parts in zip(prefixes, chain, strict=True)])
        ahead = [(p, s + place + 1) for p, s in starts]
        text_tokens = self.texts.tokens(ahead)
        # A few rows at a time: on a CPU, converting all logits to float32 takes as long as everything computed from them.
        seen_rows = itertools.repeat(None) if seen is None else portions(seen)
        rows = zip(portions(logits), portions(text_tokens), seen_rows, strict=False)
        results = [self._score(some.float(), own, before) for some, own, before in rows]
        confidences, scored, *runner_up_rows = (torch.cat(parts) for parts in zip(*results, strict=True))
        sure = confidences.nan_to_num(nan=1.0).tolist()  # NaN stops no draft, in decoding either
        if not self.sampling.greedy:
            ratios = zip(scored.tolist(), map(self.texts.token_prob, ahead), strict=True)
            accepted = [min(1.0, q / p) if p > 0 else 1.0 for q, p in ratios]
            return text_tokens, list(map(DraftedToken, sure, accepted))
        accepted = [float(self.texts.agrees(start, token)) for start, token in zip(ahead, scored.tolist(), strict=True)]
        if not runner_up_rows:
            return scored, list(map(DraftedToken, sure, accepted))
        probs, tokens = (rows.tolist() for rows in runner_up_rows)
        ranks = [
            next((rank for rank, token in enumerate(some) if self.texts.agrees(start, token)), self.runners)
            for start, some in zip(ahead, tokens, strict=True)
        ]
        return scored, list(map(DraftedToken, sure, accepted, probs, ranks))

    def _score(self, logits: Tensor, text_tokens: Tensor, seen: Tensor | None) -> tuple[Tensor, ...]:
        """Score a few rows ``[n, V]``.

        Returns:
            Greedy: confidences, drafted tokens, and probabilities and tokens of runners-up if there are any. Sampled:
            confidences and the draft's probabilities of the text's own tokens.
        """
        confidences, chosen = confidence(logits), self.sampling.distribution(logits, seen)
        if not self.sampling.greedy:
            return confidences, chosen.gather(1, text_tokens[:, None])[:, 0]
        if not self.runners:
            return confidences, chosen
        return confidences, chosen, *runners_up(self.sampling.penalise(logits, seen), chosen, self.runners)
