"""A pass of torch's compiler that moves what surrounds a product in a decoder layer into the kernel of the product.

The compiler fuses elementwise operators and sums with each other, but not with a kernel that is not its own. This pass
finds by their operators, whatever the model's code,

- the RMSNorm before a product of few rows, and the residual or the gate after it: arguments of
  :func:`~layerskip.kernels.few_rows_linear.few_rows_linear`;
- the RMSNorm before the product of a single row, which is a sum over elementwise products: each output computes the norm
  again, so that norm and product are sums of one shape, which the compiler fuses;
- the concatenated halves of rotary positions: an index in place of a copy, so that they fuse with norms and the cache.

This module imports the compiler, which takes seconds.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import Match, PatternExpr, fwd_only, fx_to_pattern
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

from layerskip.device.trial import first_line
from layerskip.kernels import decode_attention as attention
from layerskip.kernels import few_rows_linear as products
from layerskip.kernels.few_rows_linear import GATES, NORMS

_PRODUCT = torch.ops.layerskip.few_rows_linear.default
_MAX_FUSED = 16  # rows; of more, programs read what is fused with the product too often
_MAX_NORMED = 8192  # elements of a row, which a program reads twice
_EPSILON = 0.1234567  # stands for any in patterns
_aten, _prims = torch.ops.aten, torch.ops.prims
_SAME_ROW = (_aten.reshape.default, _aten.view.default, _prims.convert_element_type.default)
_log = logging.getLogger(__name__)


class ProductFusion(CustomGraphPass):
    """The pass, for Inductor's ``post_grad_custom_pre_pass``."""

    def __call__(self, graph: Graph) -> None:
        """Rewrite the graph of a layer on a GPU."""
        if not runs_on_gpu(graph):
            return
        rewrites = {_aten.cat.default: _rotate_in_place, _aten.sum.dim_IntList: _normalise_each, _PRODUCT: _fuse_product}
        try:
            for target, rewrite in rewrites.items():
                for node in graph.find_nodes(op="call_function", target=target):
                    rewrite(graph, node)
        except Exception as error:  # of another version of the compiler; a rewrite takes effect at its end only
            _warn(first_line(error))
            _log.debug("a rewrite fails", exc_info=error)
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        """Return what identifies the pass and our operators in the compiler's cache."""
        return get_hash_for_files((__file__, str(products.__file__), str(attention.__file__)))


@functools.cache
def _warn(reason: str) -> None:
    _log.warning("products are not fused with what surrounds them: %s", reason)


def runs_on_gpu(graph: Graph) -> bool:
    """Return whether the tensors of a graph are on a GPU."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return any(isinstance(value, Tensor) and value.device.type == "cuda" for value in values)


def _add(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a node with the metadata that the compiler reads."""
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.map_arg((args, kwargs), lambda part: part.meta["val"])
    with V.fake_mode:
        node.meta["val"] = target(*values[0], **values[1])
    if target is _PRODUCT:
        node.meta["eager_input_vals"] = values  # its inputs stay contiguous
    return node


def _rotate_in_place(graph: Graph, node: Node) -> None:
    """Write the concatenation of ``-x[..., half:]`` and ``x[..., :half]`` as ``x`` with its halves swapped and signs."""
    parts: Any = node.args[0]
    shape, dim = list(node.meta["val"].shape), node.args[1] if len(node.args) > 1 else 0
    if len(parts) != 2 or dim not in (-1, len(shape) - 1) or parts[0].target is not _aten.neg.default:
        return
    upper, lower = parts[0].args[0], parts[1]
    half = shape[-1] // 2
    if not (_is_slice(upper, half, 2 * half) and _is_slice(lower, 0, half) and upper.args[0] is lower.args[0]):
        return
    source = lower.args[0]
    with graph.inserting_before(node):
        halves = _add(graph, _aten.view.default, source, [*shape[:-1], 2, half])
        swapped = _add(graph, _prims.rev.default, halves, [len(shape) - 1])
        device, dtype = node.meta["val"].device, node.meta["val"].dtype
        signs = _add(graph, _prims.iota.default, 2, start=-1, step=2, dtype=torch.int64, device=device, requires_grad=False)
        signs = _add(graph, _prims.convert_element_type.default, _add(graph, _aten.view.default, signs, [2, 1]), dtype)
        rotated = _add(graph, _aten.view.default, _add(graph, _aten.mul.Tensor, swapped, signs), shape)
    node.replace_all_uses_with(rotated)


def _is_slice(node: Any, start: int, end: int) -> bool:
    """Return whether a node is ``x[..., start:end]`` of an ``x`` with twice as many columns."""
    if not isinstance(node, Node) or node.target is not _aten.slice.Tensor or len(node.args) != 4:
        return False
    given: Any = node.args
    source, dim, first, last = given
    shape = source.meta["val"].shape
    whole = shape[-1] == 2 * node.meta["val"].shape[-1] and dim in (-1, len(shape) - 1)
    return bool(whole and first == start and min(last, shape[-1]) == end)


def _normalise_each(graph: Graph, node: Node) -> None:
    """Compute the norm before the product of a single row, ``sum(row * weight)``, in every output of the product."""
    product = node.args[0]
    if not isinstance(product, Node) or product.target is not _aten.mul.Tensor or len(node.meta["val"].shape) != 1:
        return
    operands: Any = product.args
    row, weight = operands
    normed = row
    while isinstance(normed, Node) and normed.target in _SAME_ROW:
        normed = normed.args[0]
    outputs, width = product.meta["val"].shape
    found = _find_norm(normed, width)
    if found is None or row is normed:
        return
    match = found[1]
    source = match.kwargs["hidden"]
    with graph.inserting_before(node):
        copies = {source: _add(graph, _aten.expand.default, source, [*source.meta["val"].shape[:-2], outputs, width])}
        for part in graph.nodes:
            if part in match.nodes:
                args, kwargs = torch.fx.map_arg((part.args, part.kwargs), lambda given: copies.get(given, given))
                copies[part] = _add(graph, part.target, *args, **kwargs)
        rows = _add(graph, _aten.view.default, copies[normed], [outputs, width])
        if rows.meta["val"].dtype != row.meta["val"].dtype:
            rows = _add(graph, _prims.convert_element_type.default, rows, row.meta["val"].dtype)
        total = _add(graph, node.target, _add(graph, _aten.mul.Tensor, rows, weight), *node.args[1:], **node.kwargs)
    node.replace_all_uses_with(total)


def _fuse_product(graph: Graph, node: Node) -> None:
    """Give the product of few rows its norm and what follows it as arguments."""
    hidden, weight = node.args
    assert isinstance(hidden, Node)
    *rows, width = hidden.meta["val"].shape
    if math.prod(rows) > _MAX_FUSED:
        return
    found = _find_norm(hidden, width)
    norm, scale, epsilon = "", None, 0.0
    if found is not None:
        norm, match = found
        hidden, scale, epsilon = (match.kwargs[name] for name in ("hidden", "scale", "epsilon"))
    residual, gate, end = None, "", node
    users = list(node.users)
    gated = _find_gate(node)
    if gated is not None:
        gate, end = gated
    elif len(users) == 1 and users[0].target is _aten.add.Tensor and not users[0].kwargs:
        others = [part for part in users[0].args if part is not node]
        if len(others) == 1 and isinstance(others[0], Node):
            given, value = others[0].meta["val"], node.meta["val"]
            if given.shape == value.shape and given.dtype == value.dtype and given.is_contiguous():
                residual, end = others[0], users[0]
    if norm or gate or residual is not None:
        with graph.inserting_before(end):
            fused = _add(graph, _PRODUCT, hidden, weight, residual, gate, norm, scale, epsilon)
        end.replace_all_uses_with(fused)


def _find_gate(node: Node) -> tuple[str, Node] | None:
    """Return the gate that the halves of a product's output go through, by name, and the node with its value."""
    halves = list(node.users)
    if len(halves) == 1 and halves[0].target in (_aten.split.Tensor, _aten.split_with_sizes.default):
        halves = list(halves[0].users)
    if len(halves) != 2 or any(half.target is not operator.getitem for half in halves):
        return None
    gate, factor = sorted(halves, key=lambda half: half.args[1])  # type: ignore[arg-type, return-value]
    if gate.meta["val"].shape != factor.meta["val"].shape:
        return None
    for end in factor.users:
        for name, pattern in _patterns_of_gates(node.meta["val"].dtype):
            match = pattern.match(end)
            if isinstance(match, Match) and match.kwargs == {"gate": gate, "factor": factor}:
                within = {*gate.users, *factor.users} <= {*match.nodes}
                return (name, end) if within else None
    return None


def _find_norm(node: Any, width: int) -> tuple[str, Match] | None:
    """Return the norm of short rows that a node computes: its name, and its nodes and arguments."""
    if not isinstance(node, Node) or width > _MAX_NORMED:
        return None
    value = node.meta["val"]
    for name, pattern in _patterns_of_norms(value.dtype):
        match = pattern.match(node)
        if isinstance(match, Match):
            given, scale = match.kwargs["hidden"].meta["val"], match.kwargs["scale"].meta["val"]
            alike = given.shape == value.shape and given.dtype == scale.dtype == value.dtype and scale.shape == (width,)
            if alike and given.is_contiguous():
                return name, match
    return None


@functools.cache
def _patterns_of_norms(dtype: torch.dtype) -> list[tuple[str, PatternExpr]]:
    """Return the norms by name, with the factors of a product in either order."""

    def swapped(hidden: Tensor, scale: Tensor, epsilon: float) -> Tensor:
        return products.normalise(hidden, epsilon).to(hidden.dtype) * scale

    hidden, scale = torch.ones(1, 2, 4, dtype=dtype), torch.ones(4, dtype=dtype)
    return [_traced(*norm, hidden=hidden, scale=scale, epsilon=_EPSILON) for norm in (*NORMS.items(), ("llama", swapped))]


@functools.cache
def _patterns_of_gates(dtype: torch.dtype) -> list[tuple[str, PatternExpr]]:
    """Return the gates by name, with the factors of the product in either order."""
    gates: list[tuple[str, Callable[..., Tensor]]] = []
    for name, activation in GATES.items():
        gates.append((name, lambda gate, factor, activation=activation: activation(gate) * factor))
        gates.append((name, lambda gate, factor, activation=activation: factor * activation(gate)))
    some = torch.ones(1, 2, 4, dtype=dtype)
    return [_traced(*gate, gate=some, factor=some.clone()) for gate in gates]


def _traced(name: str, function: Callable[..., Tensor], **given: Any) -> tuple[str, PatternExpr]:
    """Return a function as a pattern of the operators into which the compiler decomposes it."""
    numbers = {argument: value for argument, value in given.items() if isinstance(value, float)}
    with unset_fake_temporarily(), torch._guards.tracing(None), torch.inference_mode(False), torch.no_grad():
        graph = fwd_only(lambda *args: function(*args), list(given.values()))
    return name, fx_to_pattern(graph, argnames=list(given), scalar_workaround=numbers)
