"""What did the target read, and what of it may a row of a pass see?

The target reads every continuation once; its keys and values are then laid one behind the other for passes whose rows come from
several continuations (:mod:`layerskip.scan.row_model`). A row sees its own continuation up to where its draft began, and its own draft.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stopping import confidence, portions
from layerskip.device.upload import upload
from layerskip.models.cache import KVCache
from layerskip.scan.row_model import RowModel
from layerskip.scan.target_pass import read
from layerskip.scan.text_cache import Likely, Memory, Text
from layerskip.texts.continuations import Continuation

Start = tuple[int, int]
"""A continuation's number, and the position in its continuation whose token is the last committed one."""


@dataclass(frozen=True)
class Pack:
    """Some starts of some continuations, whose keys and values lie one behind the other in a cache once they are laid there.

    Args:
        rows: ``[(continuation, start), ...]``.
        sizes: how many positions of each continuation they may see.
        room: positions for drafts behind them.
    """

    rows: list[tuple[int, int]]
    sizes: dict[int, int]
    room: int

    @property
    def end(self) -> int:
        """Where the continuations end and drafts begin."""
        return sum(self.sizes.values())

    @functools.cached_property
    def offsets(self) -> dict[int, int]:
        """Where each continuation begins."""
        return dict(zip(self.sizes, itertools.accumulate(self.sizes.values(), initial=0), strict=False))


class Texts:
    """Passages as the target read them.

    Args:
        model: the target.
        vocabulary: V, the width of its logits.
        continuations: its continuations.
        sampling: how they were chosen.
        enters: whether hidden states are kept, too.
        memory: of texts that were read in the same way before, and says what is kept of likely tokens.
        most_bytes: which what was read of continuations may take: later ones are left out, the first never; None for no bound.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: RowModel,
        vocabulary: int,
        continuations: Sequence[Continuation],
        sampling: Sampling,
        enters: bool = False,
        memory: Memory | None = None,
        most_bytes: int | None = None,
    ) -> None:
        self.model, self.vocabulary, self._enters = model, vocabulary, enters
        self.sampling = sampling
        memory = Memory(0, likely=0) if memory is None else memory
        self._likely = min(memory.likely, vocabulary)
        self.texts: list[Text] = []
        for continuation in continuations:
            text = memory.recall(continuation, self._read)
            if self.texts and most_bytes is not None and text.nbytes + sum(one.nbytes for one in self.texts) > most_bytes:
                break
            self.texts.append(text)
        self.continuations = tuple(continuations[: len(self.texts)])
        self._cache: KVCache | None = None
        self._laid: Pack | None = None

    def begin(self, start: Start) -> int:
        """How many tokens stand before a start's own."""
        continuation, place = start
        return len(self.continuations[continuation].prompt) + place

    def tokens(self, starts: Sequence[Start]) -> Tensor:
        """``[R]`` int64 on the device: the tokens at starts; the last one of a continuation for what lies behind it."""
        found = [self.continuations[p].tokens[min(place, len(self.continuations[p].tokens) - 1)] for p, place in starts]
        return upload(found, self.model.device)

    def agrees(self, start: Start, token: int) -> bool:
        """Whether the token at a start is this one; False behind the end of the continuation."""
        continuation, place = start
        tokens = self.continuations[continuation].tokens
        return place < len(tokens) and tokens[place] == token

    def chance(self, start: Start) -> float:
        """Where tokens are sampled: the target's probability of the token at a start; 1.0 behind the end."""
        continuation, place = start
        chances = self.texts[continuation].chances
        return float(chances[place]) if place < len(chances) else 1.0

    def _read(self, continuation: Continuation) -> Text:
        missing = continuation.max_new_tokens - len(continuation.tokens)
        tokens = upload([*continuation.prompt, *continuation.tokens, *continuation.tokens[-1:] * missing], self.model.device)
        begin, end = len(continuation.prompt), len(continuation.prompt) + len(continuation.tokens)
        logits, cache, visible, entering = read(
            self.model, tokens, tokens.shape[0] - begin + 1, tokens.shape[0] - begin if self._enters else 0
        )
        logits = logits[: end - begin]
        chances = np.empty(0)
        if not self.sampling.greedy:
            seen = None
            if self.sampling.needs_seen:
                seen = torch.cat([self.seen(tokens[:place]) for place in range(begin, end)])
            probs = self.sampling.distribution(logits, seen).gather(1, tokens[begin:end, None])[:, 0]
            chances = probs.double().cpu().numpy()
        likely = None
        if self._likely:
            found = [some.float().softmax(-1).topk(self._likely) for some in portions(logits)]
            chosen = torch.cat([some.indices for some in found]).to(torch.int32)
            likely = Likely(torch.cat([some.values for some in found]), chosen)
        # A copy would be as large as what it leaves out, where nothing is.
        kept = tuple(states[:, : end - begin].clone() if missing else states for states in entering)
        return Text(tokens, cache, visible, confidence(logits).double().cpu().numpy(), chances, likely, kept)

    def likely(self, starts: Sequence[Start]) -> Likely:
        """``[R, k]``: what the target finds likeliest behind the tokens at starts."""
        found = []
        for continuation, place in starts:
            kept = self.texts[continuation].likely
            assert kept is not None
            found.append((kept.chances[place], kept.tokens[place]))
        chances, tokens = zip(*found, strict=True)
        return Likely(torch.stack(chances), torch.stack(tokens))

    def entering(self, layer: int, starts: Sequence[Start]) -> Tensor:
        """``[1, R, H]``: what a layer was handed at the tokens of starts."""
        return torch.cat([self.texts[p].entering[layer][:, place : place + 1] for p, place in starts], 1)

    def places(self, pack: Pack, starts: Sequence[Start]) -> Tensor:
        """``[R]`` int64: where a pack's cache has the tokens at starts."""
        return upload([pack.offsets[p] + self.begin((p, place)) for p, place in starts], self.model.device)

    def pack(self, rows: list[Start], room: int) -> Pack:
        """Some starts, and the continuations that they need, with room for so many positions of drafts."""
        used = sorted({continuation for continuation, _ in rows})
        return Pack(rows, {p: len(self.continuations[p].prompt) + self.continuations[p].starts for p in used}, room)

    @property
    def cache_bytes(self) -> int:
        """What the cache of :meth:`lay` takes."""
        return 0 if self._cache is None else self._cache.nbytes

    def lay(self, pack: Pack) -> KVCache:
        """A cache that holds a pack's continuations, its length their end; there is one, for the pack last asked for."""
        if self._laid is not pack:
            if self._cache is None or self._cache.max_length < pack.end + pack.room:
                self._cache = None  # let go of it first
                self._cache = KVCache(self.model.layers, pack.end + pack.room, device=self.model.device)
            self._cache.take([(self.texts[p].cache, size) for p, size in pack.sizes.items()])
            self._laid = pack
        assert self._cache is not None
        self._cache.length = pack.end
        return self._cache

    def seen(self, tokens: Tensor) -> Tensor:
        """``[1, V]`` bool: which tokens are among these."""
        seen = torch.zeros(1, self.vocabulary, dtype=torch.bool, device=tokens.device)
        seen[0, tokens] = True
        return seen

    def visible(
        self, pack: Pack, live: list[Start], number: Tensor, branches: list[tuple[Tensor, int]], place: int
    ) -> tuple[list[Tensor], Tensor]:
        """What the rows of a pass may see, per layer, and where they stand in their own texts."""
        device = self.model.device
        starts = [self.begin(start) for start in live]
        begin = torch.tensor(starts, device=device)
        positions = begin + place
        offsets = torch.tensor([pack.offsets[p] for p, _ in live], device=device)
        key = torch.arange(pack.end, device=device)
        own = torch.cat([*(n for n, _ in branches), number])
        behind = torch.cat([torch.full_like(n, at) for n, at in [*branches, (number, place)]])
        inside = (key >= offsets[:, None]) & (key < (offsets + begin)[:, None])
        plain = torch.cat((inside, own == number[:, None]), 1)
        masks: dict[tuple[int, ...], Tensor] = {}
        found = []
        for layer in range(self.model.layers):
            windows = {p: self.texts[p].visible[layer] for p in pack.offsets}
            kind = tuple(id(window) for window in windows.values())
            if kind not in masks:
                masks[kind] = self._windowed(plain, windows, pack, live, behind, place)
            found.append(masks[kind])
        return found, positions

    def _windowed(
        self,
        plain: Tensor,
        windows: dict[int, Tensor | None],
        pack: Pack,
        live: list[Start],
        behind: Tensor,
        place: int,
    ) -> Tensor:
        """``plain`` without what a layer's window hides from a row at its position."""
        if all(window is None for window in windows.values()):
            return plain
        size = plain.shape[1] - behind.shape[0]
        result = plain.clone()
        for row, (p, start) in enumerate(live):
            window = windows[p]
            if window is None:
                continue
            begin, offset = len(self.continuations[p].prompt) + start, pack.offsets[p]
            width = min(window.shape[1], size - offset)
            result[row, offset : offset + width] &= window[begin + place, :width]
            result[row, size:] &= window[begin + place, (begin + behind).clamp_max(window.shape[1] - 1)]
        return result


def runs_of(rows: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Where runs of the same row begin and end, such as of rows of one continuation."""
    ends = list(itertools.accumulate(len(list(group)) for _, group in itertools.groupby(rows)))
    return list(itertools.pairwise([0, *ends]))
