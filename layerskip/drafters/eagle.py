"""Drafting with a trained head over the target's hidden states, in chains or in trees that follow its confidence.

EAGLE (arXiv 2401.15077), algorithm 1, drafts chains; EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees
(arXiv 2406.16858), section 4, grows trees level by level from the branches most likely to be accepted, and keeps the best of
all. The head has a cache of its own, of one layer, which rejected tokens leave as they leave the target's. One of three
layers, after EAGLE-3 (arXiv 2503.01840), drafts in the same ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.config import ConfigError, Kind, SpeculativeConfig, StopRule
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Said
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.stopping import Stopped, Stopper
from layerskip.decoding.verify import Verdict
from layerskip.device.upload import upload
from layerskip.drafters.chain import draft_chain
from layerskip.drafters.registry import register
from layerskip.heads.eagle import EagleHead, load_eagle
from layerskip.heads.readout import Readout
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.graph_capture import RecordedCache
from layerskip.models.target import Target


class Eagle(Stopped):
    """Drafts with a head.

    Args:
        head: the trained one.
        embeddings: the target's.
        readout: the target's output layer over what is drafted from.
        draft_length: the most tokens of a chain, or the depth of a tree.
        stop: when a chain stops before that.
        candidates: with 1 chains are drafted; with more, so many successors of each of so many branches are looked at.
        tree_tokens: the most tokens of a tree.
        least_probability: a branch ends where the head thinks it less likely.
    """

    def __init__(
        self,
        head: EagleHead,
        embeddings: nn.Module,
        readout: Readout,
        draft_length: int,
        stop: StopRule,
        candidates: int = 1,
        tree_tokens: int = 8,
        least_probability: float = 0.0,
    ) -> None:
        self.head, self.readout = head, readout
        self.embeddings = embeddings
        self.modules = head.shape.modules
        self.draft_length, self.candidates, self.least_probability = draft_length, candidates, least_probability
        self.tree_tokens = tree_tokens if candidates > 1 else 0
        self.stopper = Stopper(stop)
        self._step = _Step(head, embeddings, readout)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Begin with an empty cache; the prompt's hidden states are read next."""
        self._chooser = chooser
        device = self.head.fc.weight.device
        room = cache.room + self.draft_length * (1 + self.candidates if self.tree_tokens else 1)
        recorded, reads = isinstance(cache, RecordedCache), [self.embeddings]
        self._cache = acquire_cache(self.head, 1, room, device, recorded, holder=self, reads=reads)
        self._pending: list[Tensor] = []
        self.readout.begin()
        self.stopper.start()

    def read(self, features: Tensor) -> None:
        """Keep the hidden states until the tokens behind them are known, all but whose own the next context says."""
        self._pending.append(features)

    def draft(self, context: Context, limit: int) -> Draft:
        """Read what was committed, and go on from there."""
        verified = self._cache.length
        self.readout.follow(context.tokens)
        features = self.head.fuse(torch.cat(self._pending))
        count = features.shape[0]
        known = count + self.head.shape.lookback
        told = context.last if known == 1 else upload(context.tokens[-known:], context.last.device)
        depth = min(limit, self.draft_length)
        self._pending = []
        self._step.features, self._step.before = features, told[:-count]
        try:
            if not self.tree_tokens:
                tokens, drafted = told[-count:], self.readout.tokens
                return draft_chain(self._step, self._cache, tokens, depth, self._chooser, self.stopper, drafted=drafted)
            return self._grow(context.tokens, told, count, depth)
        finally:
            self._cache.length = verified + count

    def observe(self, verdict: Verdict) -> None:
        """Adapt the stop rule."""
        self.stopper.observe(len(verdict.drafted), verdict.accepted)

    def hear(self, said: Said) -> None:
        """Nothing to learn."""

    def _grow(self, text: Sequence[int], told: Tensor, count: int, depth: int) -> Draft:
        """A tree, level by level: the likeliest branches go on, and the likeliest of all tokens are kept.

        ``told`` are the last tokens of the text, of which ``count`` are new to the head.
        """
        cache, width = self._cache, self.candidates
        hidden = self._step.run(told, self._step.features, cache)[-1:]
        cache.length += count
        begin = cache.length
        ending = list(text[max(0, len(text) - self.head.shape.lookback) :])
        nodes: list[tuple[float, int, int]] = []  # chance, token, parent
        fed: dict[int, int] = {}  # row of the cache, from ``begin`` on, of every node that was fed
        ways: list[list[int]] = []  # rows from the root to each node's parent
        endings: list[list[int]] = []  # the last tokens up to each node
        front, chances = [-1], [1.0]
        for level in range(depth):
            chosen = self.readout(hidden).float().softmax(-1).topk(min(width, self.readout.weight.shape[0]), dim=-1)
            # At once, as every copy to the host waits for the device; float32 holds every place.
            likely = torch.cat((chosen.values, chosen.indices.float()), -1).tolist()
            born: list[int] = []
            for parent, chance, row in zip(front, chances, likely, strict=True):
                way = [] if parent < 0 else [*ways[parent], fed[parent]]
                before = ending if parent < 0 else endings[parent]
                for probability, place in zip(row[: len(row) // 2], map(int, row[len(row) // 2 :]), strict=True):
                    if chance * probability >= self.least_probability:
                        born.append(len(nodes))
                        token = self.readout.token(place)
                        nodes.append((chance * probability, token, parent))
                        ways.append(way)
                        endings.append([*before, token][-1 - self.head.shape.lookback :])
            best = sorted(born, key=lambda node: -nodes[node][0])[:width]
            if level + 1 == depth or not best:
                break
            parents = [front.index(nodes[node][2]) for node in best]
            for row, node in enumerate(best):
                fed[node] = cache.length - begin + row
            states = hidden[upload(parents, hidden.device)]
            told = upload([endings[node] for node in best], hidden.device)
            hidden = self._feed(told, states, [ways[node] for node in best], begin, level)
            front, chances = best, [nodes[node][0] for node in best]
        kept = sorted(range(len(nodes)), key=lambda node: (-nodes[node][0], node))[: self.tree_tokens]
        kept.sort()  # a parent is never less likely than its children, so it is among them and comes before
        number = {-1: -1} | {node: place for place, node in enumerate(kept)}
        return Draft.of_tree([nodes[node][1] for node in kept], [number[nodes[node][2]] for node in kept], told.device)

    def _feed(self, told: Tensor, features: Tensor, ways: list[list[int]], begin: int, level: int) -> Tensor:
        """Hidden states behind some nodes of one level, each seeing the sequence and its own branch."""
        cache, count, device = self._cache, told.shape[0], features.device
        rows = [[begin + row for row in way] + [cache.length + place] for place, way in enumerate(ways)]
        seen = torch.zeros(count, cache.max_length, dtype=torch.bool)
        seen[:, :begin] = True
        for place, row in enumerate(rows):
            seen[place, row] = True
        positions = torch.full((count,), begin + level, device=device)
        hidden = self._step.run(told, features, cache, positions, upload(seen, device))
        cache.length += count
        return hidden


class _Step(nn.Module):
    """The head as a model that says what follows a block, fed with its own outputs behind the target's."""

    def __init__(self, head: EagleHead, embeddings: nn.Module, readout: Readout) -> None:
        super().__init__()
        self._parts = (head, embeddings, readout)  # a tuple, so that they are not this module's own
        self.features = torch.empty(0)
        self.before = torch.empty(0, dtype=torch.int64)  # tokens that the head looks back at

    def forward(self, input_ids: Tensor, past_key_values: KVCache, **_: Any) -> SimpleNamespace:
        """``[1, n]`` tokens to ``[1, 1, v]`` logits behind the last of them."""
        head, readout = self._parts[0], self._parts[2]
        told = torch.cat((self.before, input_ids[0]))
        hidden = self.run(told, self.features, past_key_values)[-1:]
        self.features, self.before = hidden, told[max(0, told.shape[0] - head.shape.lookback) :]
        return SimpleNamespace(logits=readout(hidden)[None])

    def run(self, told: Tensor, features: Tensor, cache: KVCache, *where: Tensor) -> Tensor:
        """Hidden states behind some tokens.

        Args:
            told: ``[m]`` int64: one behind the other, and those that the head looks back at before them; or ``[n, m]``: each
                behind its own.
            features: ``[n, H]`` before each.
            cache: the head's.
            where: ``[n]`` int64 positions and ``[n, max_length]`` bool, what each sees, if not one behind the other.

        Returns:
            ``[n, H]``.
        """
        head, embeddings, _ = self._parts

        def compute(told: Tensor, features: Tensor, *where: Tensor) -> tuple[Tensor, ...]:
            count = features.shape[0]
            if not where:
                return (head(head.look(embeddings(told)[None], count), features[None], cache)[0],)
            positions, visible = where
            keys = cache.get_mask_sizes(count, 0)[0]
            embedded = head.look(embeddings(told), 1).transpose(0, 1)
            return (head(embedded, features[None], cache, positions[None], visible[None, None, :, :keys])[0],)

        inputs = told, features, *where
        if isinstance(cache, RecordedCache) and cache.records(head, features.shape[0]):
            return cache.replay(head, None, inputs, compute)[0]
        return compute(*inputs)[0]


def _build(config: SpeculativeConfig, target: Target) -> Eagle:
    trained = load_eagle(config.head, target)
    readout, embeddings = Readout(target, trained.tokens), target.model.get_input_embeddings()
    tree = config.candidates, config.tree_tokens, config.least_probability
    return Eagle(trained, embeddings, readout, config.draft_length, config.stop, *tree)


def _check(config: SpeculativeConfig) -> None:
    if config.candidates > 1 and config.stop.kind != "length":
        raise ConfigError("stop: trees end by least_probability")


def _unused(config: SpeculativeConfig) -> Sequence[str]:
    return ("tree_tokens", "least_probability") if config.candidates == 1 else ()


def _label(config: SpeculativeConfig) -> str:
    return config.head + (f", trees of {config.tree_tokens}, {config.candidates} wide" if config.candidates > 1 else "")


register(
    Kind(
        "eagle",
        ("head", "draft_length", "stop", "candidates", "tree_tokens", "least_probability"),
        check=_check,
        unused=_unused,
        label=_label,
        benchmark={
            "head": "???",
            "draft_length": 3,
            "candidates": 4,
            "tree_tokens": 8,
            "least_probability": 0.05,
            "stop": "length",
        },
    ),
    _build,
)
