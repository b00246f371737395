"""How does a model look at a tree of drafted tokens in one pass?

Every node sees the sequence and its own ancestors, and stands where it would stand in its branch (SpecInfer, arXiv
2305.09781, section 4.2). What a family's layers see in a window or a chunk is taken from the mask that its own functions
make: for a chain as long as the tree, from which each node takes the row and the columns of its depth. A twin of the model
hands its attention sub-layers that mask, so no family's code is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.decoding.draft import Draft
from layerskip.device.tolerance import close
from layerskip.device.upload import upload
from layerskip.models.architecture import UnsupportedModel, architecture
from layerskip.models.cache import KVCache
from layerskip.models.features import NOTHING, Features
from layerskip.models.forward import forward
from layerskip.models.graph_capture import RecordedCache, widened
from layerskip.models.skip_view import OncePerModel, twin

_PROBE = 6  # tokens before the tree of the self-check
_PROBE_PARENTS = (-1, -1, 0, 1, 2, 2)


class TreeModel:
    """A target whose passes run over a tree.

    Args:
        model: the target's.

    Attributes:
        view: a second tree of modules over its tensors, which the passes run through.

    Raises:
        UnsupportedModel: its sub-layers cannot be found, its attention takes no mask by name, or a branch of a tree does
            not give what the same tokens give in a chain.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        found = architecture(model)
        self._name = type(model).__name__
        if getattr(model.config.get_text_config(decoder=True), "attn_temperature_tuning", False):
            raise self._refusal("its queries are scaled by where they lie in a block, not by their positions")
        self._layers = len(found.blocks)
        self.view = twin(model)
        self._shape: tuple[Tensor, Tensor, Tensor] | None = None  # of the pass at work: depths, ancestors, its columns
        self._keys = 0
        self._masks: dict[int, tuple[Any, Tensor]] = {}
        blocks = self.view.get_submodule(found.path)
        for index, block in enumerate(found.blocks):
            for name in block.attention:
                child = blocks.get_submodule(f"{index}.{name}")
                child.forward = self._gated(child.forward)
        self._check(model)

    def _gated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if "attention_mask" not in kwargs:
                raise self._refusal("its attention takes no attention_mask by name")
            mask = kwargs["attention_mask"]
            if id(mask) not in self._masks:  # layers share their masks; the first one is kept alive with its tree's
                self._masks[id(mask)] = mask, self._of_tree(mask)
            return original(*args, **kwargs | {"attention_mask": self._masks[id(mask)][1]})

        return forward

    def _of_tree(self, mask: Tensor | None) -> Tensor:
        assert self._shape is not None
        depths, ancestors, columns = self._shape
        if mask is None:  # plain causal attention
            mask = (torch.arange(self._keys, device=depths.device) <= columns[:, None])[None, None]
        rows = mask.index_select(2, depths)
        own = rows.index_select(3, columns[0] + depths)
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        # What stands behind the block is hidden from a chain of its length, hence in these rows, too.
        return rows.index_copy(3, columns, torch.where(ancestors, own, hidden))

    def run(self, block: Tensor, parents: Sequence[int], cache: KVCache, features: Features = NOTHING) -> Tensor:
        """One pass; writes the block's keys and values behind ``cache.length``, which it leaves where it is.

        Args:
            block: ``[n + 1]`` int64: the last token of the sequence, then the nodes.
            parents: of each of the n nodes, an earlier node, or -1 for the last token of the sequence.
            cache: the model's.
            features: read in this pass.

        Returns:
            ``[n + 1, V]`` logits behind each of them.
        """
        size = block.shape[0]
        wide = widened(size)
        if isinstance(cache, RecordedCache) and cache.records(self.view, wide):
            # Few widths are recorded: behind the tree come further children of the root, of which nothing is read. They are
            # the root's own token, as the text has that one already, and what a model makes of others nobody knows.
            padded = (*parents, *(-1,) * (wide - size))
            filled = torch.cat((block, block[:1].expand(wide - size)))
            inputs = filled, *depths_and_ancestors(padded, block.device)
            found = cache.replay(self.view, features.modules, inputs, functools.partial(self._pass, cache, features))
            logits, *parts = (part[..., :size, :] for part in found)
            features.parts = tuple(parts)
            return logits
        return self._pass(cache, features, block, *depths_and_ancestors(tuple(parents), block.device))[0]

    def _pass(
        self, cache: KVCache, features: Features, block: Tensor, depths: Tensor, ancestors: Tensor
    ) -> tuple[Tensor, ...]:
        columns = torch.arange(block.shape[0], device=block.device) + cache.position
        self._shape, self._masks = (depths, ancestors, columns), {}
        self._keys = cache.get_mask_sizes(block.shape[0], 0)[0]
        try:
            with features.of(self.view):
                logits = forward(self.view, block, cache, block.shape[0], depths + cache.position)
        finally:
            self._shape, self._masks = None, {}
        return logits, *features.parts

    @torch.inference_mode()
    def _check(self, model: PreTrainedModel) -> None:
        """A branch must give what the same tokens give one behind the other."""
        # From the middle of the vocabulary: special tokens lie at its ends, and half precision is far off on those that a
        # model was never trained on.
        size = _vocabulary(model)
        tokens = (size // 3 + 17 * torch.arange(_PROBE + 1 + len(_PROBE_PARENTS), device=model.device)) % size
        prompt, block = tokens[:_PROBE], tokens[_PROBE:]
        cache = KVCache(self._layers, tokens.shape[0], device=model.device)
        forward(model, prompt, cache, last=1)
        cache.length = _PROBE
        try:
            found = self.run(block, _PROBE_PARENTS, cache)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, (UnsupportedModel, torch.OutOfMemoryError)):
                raise
            raise self._refusal(f"a pass over a tree fails ({' '.join(str(error).split())[:200]})") from error
        for leaf in range(len(_PROBE_PARENTS)):
            branch = path_to(leaf, _PROBE_PARENTS)
            expected = forward(model, block[[0, *(node + 1 for node in branch)]], cache, last=1)[0]
            if not close(found[leaf + 1], expected):
                raise self._refusal("a branch of a tree is not what the same tokens are in a chain")

    def _refusal(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._name}: cannot verify trees: {reason}")


def tree_model(model: PreTrainedModel) -> TreeModel:
    """The model as trees need it; made once per model, and again when the model's tensors are others.

    Raises:
        UnsupportedModel: as :class:`TreeModel`.
    """
    return _models.of(model)


_models = OncePerModel(TreeModel)


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the root's child down to a node."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def depth(parents: Sequence[int]) -> int:
    """How many nodes a tree's longest branch has."""
    levels = [0]
    for parent in parents:
        levels.append(levels[parent + 1] + 1)
    return max(levels)


def levels(draft: Draft) -> int:
    """How many tokens a draft has in a row: of a chain all, of a tree those of its longest branch."""
    return draft.tokens.shape[0] if draft.parents is None else depth(draft.parents)


@functools.lru_cache(maxsize=256)
def depths_and_ancestors(parents: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """A tree's shape, its root being the last token of the sequence.

    Args:
        parents: of each of n nodes, an earlier node or -1.

    Returns:
        ``[n + 1]`` int64: every token's depth, the root's 0; ``[n + 1, n + 1]`` bool: which tokens lie on the way from the
        root to each, itself included.

    Raises:
        ValueError: a node's parent is none that comes before it.
    """
    depths = [0]
    size = len(parents) + 1
    ancestors = [[row == column for column in range(size)] for row in range(size)]
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents: {parent} is no node before {node}")
        depths.append(depths[parent + 1] + 1)
        ancestors[node + 1] = [a or b for a, b in zip(ancestors[node + 1], ancestors[parent + 1], strict=True)]
    flat = [int(flag) for row in ancestors for flag in row]
    return upload(depths, device), upload(flat, device).bool().view(size, size)


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)
