"""How do drafts go on from many places of a text at once? A pass for every drafted token, over those that are still of use.

As long as a draft is right, its layers up to the first one that it skips in part would compute what the target computed when
it read the text. So a pass begins behind them, with the target's own hidden states, keys and values; only what stands behind
a wrong token is computed from the first layer on, in a pass of its own up to there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from layerskip.device.memory import out_of_memory
from layerskip.device.tolerance import close
from layerskip.device.upload import upload
from layerskip.mask import SkipMask
from layerskip.models.bridge import Bridges
from layerskip.scan.acceptance import Drafted, Judge
from layerskip.scan.text_batch import Pack, Texts, runs_of

Row = tuple[int, int, int]
"""The number of what drafts, of a continuation, and the start in it."""

_CHECKED = 8
"""Starts that the self-check looks at."""

_FEW = 32
"""A pass over fewer rows takes as long as over so many, about: that of reading the weights."""

_WORTH = 16
"""Where drafts that are wrong are among them, beginning late must save as much as so many rows take."""

_HOPELESS = 1e-4
"""Sampling: below this chance of being reached, deeper passes leave a start out."""


@dataclass
class _Passes:
    """The passes over one pack.

    Args:
        texts: the target's own.
        pack: of them.
        masks: what drafts skip.
        bridges: of every mask.
    """

    texts: Texts
    pack: Pack
    masks: Sequence[SkipMask]
    bridges: Sequence[Bridges | None]

    def __post_init__(self) -> None:
        self.cache = self.texts.lay(self.pack)
        self._branches: list[tuple[Tensor, int]] = []  # every pass's rows' numbers, and how far behind the start they stand

    def run(self, live: Sequence[Row], number: Tensor, tokens: Tensor, place: int, first: int = 0, whole: int = 0) -> Tensor:
        """``[R, V]`` logits behind the next tokens of some rows.

        Args:
            live: the rows.
            number: ``[R]`` int64: theirs, which tells whose states they see.
            tokens: ``[R]`` int64.
            place: how far behind their starts these stand.
            first: the layer to begin at; if it is not 0, the text must have had these tokens there.
            whole: so many rows, which come first, begin at layer 0 all the same: theirs are not the text's tokens.
        """
        model, starts, cache = self.texts.model, [(p, s) for _, p, s in live], self.cache
        visible, positions = self.texts.visible(self.pack, starts, number, self._branches, place)
        of = torch.tensor([m for m, _, _ in live], device=model.device)
        parts = runs_of([(row < whole, p) for row, (p, _) in enumerate(starts)])
        late, base = None, cache.length
        if first:
            reached = [(p, s + place) for p, s in starts[whole:]]
            entering = self.texts.entering(first, reached)
            if whole:
                narrowed = {id(mask): mask[:whole, : base + whole] for mask in visible}
                theirs = [part for part in parts if part[1] <= whole]
                model.prepare([narrowed[id(mask)] for mask in visible], self.masks, of[:whole], theirs, self.bridges)
                entering = torch.cat((model.states(first, tokens[:whole], positions[:whole], cache), entering), 1)
            late = first, entering
            cache.length = base + whole
            cache.repeat(first, self.texts.places(self.pack, reached))  # drafts that go wrong later see them
            cache.length = base
        logits = model.run(tokens, positions, cache, visible, self.masks, of, parts, self.bridges, late)
        self._branches.append((number, place))
        cache.length += len(live)
        return logits


class ManyDrafts:
    """Drafts from starts of texts.

    Args:
        texts: the target's own, read with its hidden states.
        runners: so many runners-up of every drafted token are looked at.
        pack: of those texts; a few of its starts tell whether passes may begin late. None where there is none.
    """

    def __init__(self, texts: Texts, runners: int, pack: Pack | None) -> None:
        self.texts, self.sampling, self._judge = texts, texts.sampling, Judge(texts, runners)
        self._late = pack is not None and self._may_begin_late(pack)

    @torch.inference_mode()
    def _may_begin_late(self, pack: Pack) -> bool:
        """Whether a pass from the last layer on says what a whole one does: a family may hand on more than hidden states."""
        layers, starts = self.texts.model.layers, pack.rows[:_CHECKED]
        live, tokens = [(0, *start) for start in starts], self.texts.tokens(starts)
        number = torch.arange(len(live), device=tokens.device)
        found = []
        for first in (0, layers - 1):
            passes = _Passes(self.texts, pack, [SkipMask.none(layers)], [None])
            try:
                found.append(passes.run(live, number, tokens, 0, first))
            except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
                if first == 0 or out_of_memory(error):
                    raise
                return False
            finally:
                passes.cache.length = pack.end
        return close(found[1], found[0])

    def of(
        self,
        pack: Pack,
        masks: Sequence[SkipMask],
        bridges: Sequence[Bridges | None],
        tokens: Tensor | None,
        rows: list[Row],
        depth: int,
        floor: float | None,
        wrong: bool = False,
    ) -> Iterator[tuple[Row, int, Drafted]]:
        """Draft from some starts of a pack.

        Args:
            pack: of the texts.
            masks: what the drafts skip.
            bridges: of every mask.
            tokens: ``[v]`` int64: those that are drafted beside what was said before; None for all.
            rows: at least one for every mask.
            depth: the most tokens.
            floor: drafts go on while they are at least so sure.
            wrong: and only then; else also while they are right.

        Yields:
            row, place (from 0), and what was drafted there.
        """
        passes, hidden, texts = (
            _Passes(self.texts, pack, masks, bridges),
            self._hidden(tokens, rows),
            self.texts.continuations,
        )
        skips = (gap.first for mask in masks for gap in mask.gaps)
        first = min(skips, default=self.texts.model.layers - 1) if self._late else 0
        chain = self.texts.tokens([(p, s) for _, p, s in rows])[:, None]
        number = torch.arange(len(rows), device=chain.device)
        reach, right = np.ones(len(rows)), np.ones(len(rows), dtype=bool)
        try:
            for place in range(depth):
                here = number.tolist()
                if not here:
                    break
                wrong_ones = int((~right[here]).sum())
                begin = first if max(len(here), _FEW) - max(wrong_ones, _FEW) >= _WORTH or not wrong_ones else 0
                whole = wrong_ones if begin else 0
                if whole:  # they come first
                    order = np.argsort(right[here], kind="stable").tolist()
                    number, chain = number[order], chain[order]
                    here = number.tolist()
                live = [rows[i] for i in here]
                said = passes.run(live, number, chain[:, -1], place, begin, whole)
                if hidden is not None:
                    said = said.masked_fill(hidden[number], -float("inf"))
                drafted, found = self._judge(said, [(p, s) for _, p, s in live], chain, place)
                for i, row, one in zip(here, live, found, strict=True):
                    reach[i] *= one.kept
                    _, p, s = row
                    # Where tokens are sampled, the text leads; nothing is kept behind its last start.
                    right[i] &= s + place + 1 < texts[p].starts and (one.kept == 1.0 or not self.sampling.greedy)
                    yield row, place, one
                going = [
                    place + 1 < texts[p].limit(s)
                    and (
                        (floor is not None and one.confidence >= floor)
                        or (not wrong and chance > _HOPELESS and s + place + 1 < texts[p].starts)
                    )
                    for (_, p, s), one, chance in zip(live, found, reach[here], strict=True)
                ]
                chosen = torch.tensor(going, device=chain.device)
                number = number[chosen]
                chain = torch.cat((chain, drafted[:, None]), 1)[chosen]
        finally:
            passes.cache.length = pack.end

    def _hidden(self, tokens: Tensor | None, rows: Sequence[Row]) -> Tensor | None:
        """``[R, V]`` bool: what is not drafted from each start, neither common nor said before."""
        if tokens is None:
            return None
        hidden = torch.ones(len(rows), self.texts.vocabulary, dtype=torch.bool, device=self.texts.model.device)
        hidden[:, tokens.to(hidden.device)] = False
        of, starts = torch.tensor([[p, s] for _, p, s in rows], device=hidden.device).T
        for p in sorted({p for _, p, _ in rows}):
            here = (of == p).nonzero()[:, 0]
            hidden[here] &= self._first_said(p, hidden.device) > starts[here, None]
        return hidden

    def _first_said(self, continuation: int, device: torch.device) -> Tensor:
        """``[V]`` int64: where in a continuation each token comes first; -1 for the prompt's, and far behind for others."""
        vocabulary, text = self.texts.vocabulary, self.texts.continuations[continuation]
        said = [(token, -1) for token in text.prompt] + [(token, place) for place, token in enumerate(text.tokens)]
        first = {token: place for token, place in reversed(said) if token < vocabulary}
        found = torch.full((vocabulary,), torch.iinfo(torch.int64).max, device=device)
        found[upload(list(first), device)] = upload(list(first.values()), device)
        return found
