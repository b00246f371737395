"""Fitting of the bridges of a mask in closed form, gap by gap from the bottom, to states of drafts along the target's texts.

A ridge regression (:mod:`layerskip.bridges.ridge`) maps the hidden state before a gap to the correction that gives the draft
the target's own state after it. Earlier bridges are in place when the next one is fitted, so that it also corrects their
errors. Every position of the target's continuations is the start of a draft, as in a scan (:mod:`layerskip.scan.scan`): it
attends to the target's keys and values before it, and to its own.

As many texts are used as fit a memory budget together with everything that fitting needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.bridges.bridge import Bridge, Bridges, BridgeShape
from layerskip.bridges.ridge import mlp_regression_bytes, regress, regress_mlp, regression_bytes
from layerskip.decoding.sampling import Sampling
from layerskip.mask import Gap, SkipMask
from layerskip.models.target import Target
from layerskip.scan.row_model import RowModel
from layerskip.scan.text_batch import StartPack, TextBatch, TextCache
from layerskip.texts.continuations import Continuation, continuations_digest

_USED = 0.9  # of the budget; the rest is for the rounding of allocators
_LOGIT_BYTES = 8  # on top of each logit. GPU: its float32 and a probability; CPU: another pass's and a kernel's own copy
_COPIES, _FLOAT_BYTES = 3, 12  # of a fit, for each hidden state element: copies in the target's dtype, and bytes in float32


def select_continuations(
    target: Target,
    model: RowModel,
    continuations: Sequence[Continuation],
    max_bytes: int,
    max_rows: int,
    width: int,
    text_cache: TextCache | None = None,
) -> tuple[Continuation, ...]:
    """Select as many continuations, evenly spread, as a budget of bytes holds.

    The budget is for everything that is kept, and for what reading or fitting needs in addition, whichever is more.

    Args:
        max_rows: rows per pass while bridges are fitted.
        width: of the widest MLP to fit; 0 for none.
        text_cache: decides how many of the most likely tokens are kept.

    Raises:
        ValueError: not even one continuation fits.
    """
    if not continuations:
        raise ValueError(f"max_bytes: {max_bytes} are of no use without a continuation of two tokens to draft")
    size, hidden, vocabulary = target.model.dtype.itemsize, target.hidden, target.vocabulary
    (one,) = TextBatch(model, vocabulary, continuations[:1], Sampling()).texts
    position_bytes = one.cache.nbytes // one.cache.max_length
    kinds = len({id(window) for window in one.visible})
    mask_bytes = kinds * (1 + (size if model.additive else 1))  # per row and key, of our mask and the model's own
    top_bytes = 0 if text_cache is None else 8 * min(text_cache.top_k, vocabulary)
    keys, kept = list[int](), list[int]()
    for each in continuations:
        length = len(each.prompt) + each.max_new_tokens
        keys.append(max_rows + length * (max_rows // each.starts + 2))
        row_bytes = hidden * (target.layers + 1) * size + mask_bytes * keys[-1]
        kept.append(length * (position_bytes + kinds * length) + len(each.tokens) * top_bytes + each.starts * row_bytes)
    for count in range(len(continuations), 0, -1):
        places = [number * len(continuations) // count for number in range(count)]
        rows = sum(continuations[place].starts for place in places)
        read_rows = max(max_rows, *(continuations[place].max_new_tokens for place in places))
        reading = read_rows * vocabulary * (size + _LOGIT_BYTES)
        fitting = rows * hidden * (_COPIES * size + _FLOAT_BYTES)
        fitting += max(regression_bytes(rows, hidden), mlp_regression_bytes(rows, hidden, width))
        shared = position_bytes * max(keys[place] for place in places)
        total = shared + sum(kept[place] for place in places) + max(reading, fitting)
        if total <= _USED * max_bytes:
            return tuple(continuations[place] for place in places)
    few = f"{max_bytes} hold not even one of {len(continuations)} continuations"
    raise ValueError(f"max_bytes: {few}, which takes {int(total / _USED) + 1}")


_HELD_OUT, _MAX_HELD_OUT = 0.2, 2000  # of the rows; the last ones, so that they come from other continuations
_FAR = 8.0  # outputs with a norm beyond this multiple of the median are left out
_WORK = {"layers": 1, "attention": 4, "mlp": 4}  # cost of a gap in regressions; sub-layers also have to run their layer
_FULL_WORK = 8  # work up to which all rows are used; masks with more gaps use fewer rows, so that none takes far longer
_MIN_ROWS = 4  # rows per hidden state element that are used in any case


@dataclass(frozen=True)
class Fit:
    """Fitted bridges in float32, with the ridge constant of every gap.

    Args:
        empty: how often the draft's first token is the target's on held-out rows, without bridges.
        bridged: the same with bridges.
        rows: the rows used for fitting, including outliers that were left out.
    """

    bridges: Bridges
    ridges: dict[str, float]
    empty: float
    bridged: float
    rows: int
    seconds: float

    @property
    def helps(self) -> bool:
        """True if the bridges improve the draft."""
        return self.bridged > self.empty


@dataclass(frozen=True)
class _Part:
    """The rows of one pack with the states of the target's own pass, before the first layer and after each."""

    pack: StartPack
    positions: Tensor
    visible: list[Tensor]
    layers: list[Callable[[Tensor], Tensor]]
    states: list[Tensor]


class Calibration:
    """The hidden states that bridges of a target are fitted to.

    Args:
        max_bytes: budget for everything that is kept, and for what reading and fitting need in addition, with logits but
            without the bridges themselves. If not all continuations fit, evenly spread ones are used.
        text_cache: states of texts that the target has read; the texts read here are added.
        width: width of the widest MLP that the budget has to suffice for.

    Raises:
        UnsupportedModel: the model's sub-layers cannot be skipped, or its attention does not support independent rows.
        ValueError: not even one continuation fits the budget.
    """

    def __init__(
        self,
        target: Target,
        continuations: Sequence[Continuation],
        max_bytes: int,
        max_rows: int = 256,
        text_cache: TextCache | None = None,
        width: int = 0,
    ) -> None:
        self.target = target
        self._model = RowModel(target.model)
        some = [continuation for continuation in continuations if continuation.starts > 1]
        self.continuations = select_continuations(target, self._model, some, max_bytes, max_rows, width, text_cache)
        self._texts = TextBatch(self._model, target.vocabulary, self.continuations, Sampling(), text_cache=text_cache)
        self.starts = [(p, s) for p, continuation in enumerate(self.continuations) for s in range(continuation.starts)]
        parts = [self.starts[i : i + max_rows] for i in range(0, len(self.starts), max_rows)]
        packs = [self._texts.pack(part, len(part)) for part in parts]
        self._texts.load(max(packs, key=lambda pack: pack.end + pack.room))  # allocates a cache with room for all packs
        self._parts = [self._read(pack) for pack in packs]

    @property
    def digest(self) -> str:
        """A digest of the continuations."""
        return continuations_digest(self.continuations)

    @property
    def held_out(self) -> tuple[Continuation, ...]:
        """The continuations with held-out rows; not for training. Some rows of the first one may be used for fitting."""
        first = len(self.starts) - _held_out(len(self.starts))
        return self.continuations[self.starts[first][0] :]

    def fit(self, shape: BridgeShape) -> Fit:
        """Fit the bridges of a mask: maps in closed form, then MLPs, if the kind has them, by gradient descent."""
        begin = time.monotonic()
        with torch.random.fork_rng(devices=[]):  # initialises maps of lower rank and MLPs
            torch.manual_seed(0)
            bridges = Bridges(shape).to(self.target.device)
        ridges, rows = self._fit(bridges)
        empty, bridged = self.judge(bridges.mask, None), self.judge(bridges.mask, bridges)
        return Fit(bridges, ridges, empty, bridged, rows, time.monotonic() - begin)

    @torch.inference_mode()
    def _read(self, pack: StartPack) -> _Part:
        tokens = self._texts.tokens(pack.rows)
        visible, positions = self._texts.visible(pack, pack.rows, torch.arange(len(pack.rows)).to(tokens.device), [], 0)
        return _Part(
            pack, positions, visible, *self._model.layer_functions(tokens, positions, self._texts.load(pack), visible)
        )

    @torch.inference_mode()
    def _fit(self, bridges: Bridges) -> tuple[dict[str, float], int]:
        ridges: dict[str, float] = {}
        parts, rows = self._fitted_parts(bridges.mask.gaps)
        streams = [part.states[0] for part in parts]
        done, drifted = 0, False  # layers that the streams have passed; whether they differ from the target's states
        for gap, bridge in bridges.items():
            whole, pairs = gap.kind == "layers", list[tuple[Tensor, Tensor]]()
            plain = not whole and self._is_residual(parts[0], gap)
            for number, part in enumerate(parts):
                stream = self._advance(part, streams[number], done, gap.first) if drifted else part.states[gap.first]
                streams[number] = stream
                after = part.states[gap.last + 1]
                pairs.append((stream, after - stream) if whole else self._sublayer_pair(part, stream, gap, plain))
            ridges[gap.name] = _regress(bridge, pairs, rows)
            del pairs
            for number, part in enumerate(parts):
                if whole:
                    streams[number] = streams[number] + bridge(streams[number])
                else:
                    self._prepare(part, _single(self.target.layers, gap), bridges)
                    streams[number] = part.layers[gap.first](streams[number])
            done, drifted = gap.last + 1, True
        return ridges, rows

    def _fitted_parts(self, gaps: Sequence[Gap]) -> tuple[list[_Part], int]:
        """Return the parts that gaps are fitted to, evenly spread, and the number of their rows that are not held out."""
        left, available = len(self.starts) - _held_out(len(self.starts)), list[tuple[_Part, int]]()
        for part in self._parts:
            if left > 0:
                available.append((part, min(left, len(part.pack.rows))))
            left -= len(part.pack.rows)
        rows = sum(size for _, size in available)
        work = sum(_WORK[gap.kind] for gap in gaps)
        wanted = max(min(rows, _MIN_ROWS * self.target.hidden), rows * _FULL_WORK // max(_FULL_WORK, work))
        count = -(-wanted * len(available) // rows)
        some = [available[number * len(available) // count] for number in range(count)]
        return [part for part, _ in some], sum(size for _, size in some)

    def _advance(self, part: _Part, stream: Tensor, first: int, last: int) -> Tensor:
        self._prepare(part, SkipMask.none(self.target.layers))
        for layer in part.layers[first:last]:
            stream = layer(stream)
        return stream

    def _sublayer_pair(self, part: _Part, stream: Tensor, gap: Gap, plain: bool) -> tuple[Tensor, Tensor]:
        """Return the input and the wanted output of the bridge of a single sub-layer in the draft, ``[1, R, H]`` each.

        If the layer adds the sub-layer's output unchanged, the bridge also corrects the drift before it.
        """
        layer = part.layers[gap.first]
        wanted = None if plain else self._sublayer_output(part, gap)
        self._prepare(part, _single(self.target.layers, gap))
        self._model.watch(gap.kind, gap.first)
        without, hidden = layer(stream), self._model.watched_states()[0]
        if wanted is None and gap.kind == "mlp":
            wanted = part.states[gap.first + 1] - without
        elif wanted is None:
            wanted = self._after_attention(part, gap) - stream
        return hidden, wanted

    def _sublayer_output(self, part: _Part, gap: Gap) -> Tensor:
        self._prepare(part, SkipMask.none(self.target.layers))
        self._model.watch(gap.kind, gap.first)
        part.layers[gap.first](part.states[gap.first])
        return self._model.watched_states()[1]

    def _after_attention(self, part: _Part, gap: Gap) -> Tensor:
        """Return the target's state after the attention of a gap's layer."""
        self._prepare(part, _single(self.target.layers, Gap("mlp", gap.first, gap.first)))
        return part.layers[gap.first](part.states[gap.first])

    def _is_residual(self, part: _Part, gap: Gap) -> bool:
        """Return whether a layer adds its sub-layer's output unchanged; some apply a norm to it first."""
        layer, own = part.layers[gap.first], part.states[gap.first]
        if gap.kind == "attention":
            return _nearly_same(own + self._sublayer_output(part, gap), self._after_attention(part, gap))
        mask = _single(self.target.layers, gap)
        probe = Bridges(BridgeShape.of(self.target, mask, "mean")).to(own.device)
        known = torch.linspace(-1, 1, own.shape[-1], device=own.device) * own.float().square().mean().sqrt()
        probe.of(gap).bias.copy_(known)
        self._prepare(part, mask, probe)
        added = layer(own)
        self._prepare(part, mask)
        return _nearly_same(known.expand_as(own), (added - layer(own)).float())

    def _prepare(self, part: _Part, mask: SkipMask, bridges: Bridges | None = None) -> None:
        self._texts.load(part.pack)
        mask_ids = torch.zeros(len(part.pack.rows), dtype=torch.int64, device=self.target.device)
        self._model.prepare(part.visible, [mask], mask_ids, replacements=[bridges])

    @torch.inference_mode()
    def judge(self, mask: SkipMask, bridges: Bridges | None) -> float:
        """Return the share of held-out rows whose first drafted token is the target's.

        Bridges are judged in the target's dtype, as they decode.
        """
        bridges = None if bridges is None else bridges.for_decoding(self.target)
        left = judged = _held_out(len(self.starts))
        right = 0
        for part in reversed(self._parts):
            rows, cache = part.pack.rows, self._texts.load(part.pack)
            self._prepare(part, mask, bridges)
            logits = self._model.run(self._texts.tokens(rows), part.positions, cache)
            own = self._texts.tokens([(p, s + 1) for p, s in rows])
            right += int((logits.argmax(-1) == own)[-left:].sum())
            left -= len(rows)
            if left <= 0:
                break
        return right / judged


def _regress(bridge: Bridge, pairs: list[tuple[Tensor, Tensor]], rows: int) -> float:
    """Fit a bridge to the first rows of its inputs and wanted outputs, given by part; return the ridge constant."""
    wanted = torch.cat([part[0] for _, part in pairs])[:rows].float()
    norms = wanted.norm(dim=-1)
    near = norms <= _FAR * norms.median()
    wanted = wanted[near]
    inputs = torch.cat([hidden[0] for hidden, _ in pairs])[:rows][near].float()
    return (regress_mlp if bridge.shape.width else regress)(bridge, inputs, wanted)


def _held_out(rows: int) -> int:
    return max(1, min(int(_HELD_OUT * rows), _MAX_HELD_OUT))


def _single(layers: int, gap: Gap) -> SkipMask:
    chosen = {gap.first}
    return SkipMask.of(layers, chosen if gap.kind == "attention" else set(), chosen if gap.kind == "mlp" else set())


def _nearly_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of half precision."""
    return float((one - other).float().square().mean()) <= 1e-3 * float(one.float().square().mean())
