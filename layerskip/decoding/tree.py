"""Verification of a draft tree in one pass of the target.

Every node sees the sequence and its own ancestors, at the position that it has in its branch (SpecInfer, arXiv 2305.09781,
section 4.2). The window or chunk that a layer sees is taken from the mask that the model's own functions make for a chain as
long as the tree: each node uses the row and the columns of its depth. A second module tree over the same tensors passes this
mask to its attention sub-layers, so no model code is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from layerskip.decoding.draft import DeviceTree, Draft
from layerskip.device.transfer import copy_to_device
from layerskip.device.trial import nearly_equal
from layerskip.models.architecture import UnsupportedModel, architecture, check_finite, hidden_states
from layerskip.models.cache import KVCache
from layerskip.models.compiled_layers import eager_only
from layerskip.models.cpu_layers import is_whole_layer
from layerskip.models.cpu_pass import CpuPass
from layerskip.models.forward import Features, forward
from layerskip.models.graph_capture import CapturingCache, padded_count
from layerskip.models.skip_view import OncePerModel, shared_copy
from layerskip.models.weights import input_device

_PROBE = 6  # tokens before the tree of the self-check
_PROBE_PARENTS = (-1, -1, 0, 1, 2, 2)


class TreeModel:
    """A target that can run a pass over a tree, through a ``view``: a second module tree over the model's tensors.

    Raises:
        UnsupportedModel: the sub-layers cannot be found, attention takes no mask by name, or a branch of a tree gives other
            logits than the same tokens in a chain.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        found = architecture(model)
        self._name, self._layers = type(model).__name__, len(found.blocks)
        if getattr(model.config.get_text_config(decoder=True), "attn_temperature_tuning", False):
            raise self._refusal("its queries are scaled by their place in the block, not by their position")
        self.view = shared_copy(model)
        self._shape: tuple[Tensor, Tensor, Tensor] | None = None  # of the running pass: depths, ancestors, cache columns
        self._keys = 0  # columns of its mask
        self._masks: dict[tuple[int, torch.device], tuple[Any, Tensor]] = {}
        self._fused: CpuPass | None = vars(self.view).get("cpu_pass")
        blocks = self.view.get_submodule(found.path)
        for index, block in enumerate(found.blocks):
            layer = blocks.get_submodule(str(index))
            whole = is_whole_layer(layer)
            for child in [layer] if whole else [layer.get_submodule(name) for name in block.attention]:
                child.forward = self._gated(child.forward)
                if self._fused is not None:
                    self._fused.harmless.append(child.forward)
        self._check(model)

    def _gated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if "attention_mask" not in kwargs:
                raise self._refusal("its attention takes no attention_mask by name")
            mask = self._cached_tree_mask(kwargs["attention_mask"], hidden_states(args, kwargs).device)
            return original(*args, **kwargs | {"attention_mask": mask})

        return eager_only(forward)

    def _cached_tree_mask(self, mask: Tensor | None, device: torch.device) -> Tensor:
        key = id(mask), device  # layers share masks; keeping the original alive keeps its id unique
        if key not in self._masks:
            self._masks[key] = mask, self._tree_mask(mask, device)
        return self._masks[key][1]

    def _tree_mask(self, mask: Tensor | None, device: torch.device) -> Tensor:
        assert self._shape is not None
        depths, ancestors, columns = (part.to(device) for part in self._shape)
        if mask is None:  # plain causal attention
            mask = (torch.arange(self._keys, device=depths.device) <= columns[:, None])[None, None]
        rows = mask.index_select(2, depths)
        own = rows.index_select(3, columns[0] + depths)
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        # Columns after the block are hidden from a chain of its length, so they are hidden in these rows, too.
        return rows.index_copy(3, columns, torch.where(ancestors, own, hidden))

    def run(
        self,
        block: Tensor,
        parents: Sequence[int] | DeviceTree,
        cache: KVCache,
        features: Features | None = None,
        only_largest: bool = False,
    ) -> Tensor:
        """Return the logits ``[n + 1, V]`` after each token of a block. Writes after ``cache.length``, which stays.

        Args:
            block: ``[n + 1]`` int64: the last token of the sequence, then the n nodes, with ``parents`` as in
                :class:`~layerskip.decoding.draft.Draft`.
            features: collected during this pass.
            only_largest: whether other logits than the largest of each row may be inexact.
        """
        size = block.shape[0]
        wide = padded_count(size)
        if isinstance(cache, CapturingCache) and cache.captures(self.view, wide):
            # Few widths are captured, so the tree is padded with further children of the root, whose output is not read.
            # They repeat the root's own token: it is in the text already, so the model is known to give finite values.
            filled = torch.cat((block, block[:1].expand(wide - size)))
            inputs = filled, *tree_shape(parents, block.device, wide - size)
            compute = functools.partial(self._pass, cache, features, only_largest)
            mask_of = functools.partial(self._cached_tree_mask, device=block.device)
            logits, *states = cache.replay(self.view, features is None, inputs, compute, mask_of=mask_of)
            if features is not None:
                features.states = states[0][:size]
            return logits[:size]
        return self._pass(cache, features, only_largest, block, *tree_shape(parents, block.device))[0]

    def _pass(
        self,
        cache: KVCache,
        features: Features | None,
        only_largest: bool,
        block: Tensor,
        depths: Tensor,
        ancestors: Tensor,
    ) -> tuple[Tensor, ...]:
        columns = torch.arange(block.shape[0], device=block.device) + cache.position
        self._shape, self._masks = (depths, ancestors, columns), {}
        self._keys = cache.get_mask_sizes(block.shape[0], 0)[0]
        try:
            seen = None if self._fused is None else self._tree_mask(None, block.device)
            positions = depths + cache.position
            logits = forward(self.view, block, cache, block.shape[0], positions, features, seen, only_largest)
        finally:
            self._shape, self._masks = None, {}
        return (logits,) if features is None else (logits, features.states)

    @torch.inference_mode()
    def _check(self, model: PreTrainedModel) -> None:
        """Check that a branch gives the logits of the same tokens in a chain."""
        # From the middle of the vocabulary. Special tokens are at its ends, untrained, and far off in half precision.
        size, device = int(model.config.get_text_config(decoder=True).vocab_size), input_device(model)
        tokens = (size // 3 + 17 * torch.arange(_PROBE + 1 + len(_PROBE_PARENTS), device=device)) % size
        prompt, block = tokens[:_PROBE], tokens[_PROBE:]
        cache = KVCache(self._layers, tokens.shape[0], device=device)
        forward(model, prompt, cache, last=1)
        cache.length = _PROBE
        try:
            found = self.run(block, _PROBE_PARENTS, cache)
        except (UnsupportedModel, torch.OutOfMemoryError):
            raise
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise self._refusal(f"a pass over a tree fails ({' '.join(str(error).split())[:200]})") from error
        for leaf in range(len(_PROBE_PARENTS)):
            branch = path_to(leaf, _PROBE_PARENTS)
            expected = forward(model, block[[0, *(node + 1 for node in branch)]], cache, last=1)
            check_finite(model, expected)
            if not nearly_equal(found[leaf + 1], expected[0]):
                raise self._refusal("a branch of a tree gives other logits than the same tokens in a chain")

    def _refusal(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._name}: cannot verify trees: {reason}")


tree_model = OncePerModel(TreeModel).of
"""Returns a model's :class:`TreeModel`, which is made once, and again if the model's tensors were replaced."""


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Return the nodes from a child of the root down to a node."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def tree_depth(parents: Sequence[int]) -> int:
    """Return the number of nodes of the longest branch."""
    levels = [0]
    for parent in parents:
        levels.append(levels[parent + 1] + 1)
    return max(levels)


def draft_depth(draft: Draft) -> int:
    """Return the most tokens of a draft in a row: all of a chain, or those of a tree's longest branch."""
    if isinstance(draft.parents, DeviceTree):
        return draft.parents.depth
    return draft.tokens.shape[0] if draft.parents is None else tree_depth(draft.parents)


def tree_shape(parents: Sequence[int] | DeviceTree, device: torch.device, more: int = 0) -> tuple[Tensor, Tensor]:
    """Return the depths and the attention mask of a tree, without waiting for the device.

    Args:
        parents: of each of n nodes, as in :class:`~layerskip.decoding.draft.Draft`; the root is a token, too.
        more: the number of children of the root to add after the nodes, which n then includes.

    Returns:
        ``[n + 1]`` int64: the depth of every token, 0 for the root; ``[n + 1, n + 1]`` bool: which tokens are on the path
        from the root to each token, itself included.

    Raises:
        ValueError: a parent does not come before its node.
    """
    if not isinstance(parents, DeviceTree):
        return _known_shape((*parents, *(-1,) * more), device)
    above = pad(parents.parents, (1, more), value=-1) + 1  # of every token of the block; the root leads to itself
    steps = [torch.arange(above.shape[0], device=device)]
    for _ in range(parents.depth):
        steps.append(above.index_select(0, steps[-1]))
    paths = torch.stack(steps)
    ancestors = torch.zeros(above.shape[0], above.shape[0], dtype=torch.bool, device=device)
    return (paths[:-1] != 0).sum(0), ancestors.scatter_(1, paths.T, True)


@functools.lru_cache(maxsize=256)
def _known_shape(parents: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    depths, ancestors = [0], [[1] + [0] * len(parents)]
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents: {parent} does not come before node {node}")
        depths.append(depths[parent + 1] + 1)
        ancestors.append(ancestors[parent + 1].copy())
        ancestors[node + 1][node + 1] = 1
    return copy_to_device(depths, device), copy_to_device(ancestors, device).bool()
