"""Which bridges suit a mask? Fitted in closed form, gap by gap from the bottom, on what drafts of the target's text read.

Ridge regression (:mod:`layerskip.bridges.ridge`) from the hidden state that a gap's bridge reads to what brings
the draft back to the target's own state behind the gap. Earlier bridges are in place when the next one is fitted, so that it
also mends what they left. Every position of the target's continuations is a draft's first token, as in a scan
(:mod:`layerskip.scan.scan`): it sees the target's keys and values before it, and its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.bridges.budget import afford
from layerskip.bridges.mlp_regression import learn
from layerskip.bridges.ridge import regress
from layerskip.decoding.sampling import Sampling
from layerskip.mask import Gap, SkipMask
from layerskip.models.bridge import Bridge, Bridges, BridgeShape
from layerskip.models.target import Target
from layerskip.scan.row_model import RowModel
from layerskip.scan.text_batch import Pack, Start, Texts
from layerskip.scan.text_cache import Memory
from layerskip.texts.continuations import Continuation, digest_of

_JUDGED, _MOST_JUDGED = 0.2, 2000  # of the rows; the last ones, hence of other continuations than the rest
_FAR = 8.0  # times the median norm: targets beyond it are left out
_WORK = {"layers": 1, "attention": 4, "mlp": 4}  # of a gap, in regressions: a sub-layer's also runs its layer
_SERVED = 8  # of work that all rows are used for; gaps with more share what that takes, so that no mask takes far longer
_LEAST = 4  # rows for each number of a hidden state that gaps are fitted to, though their share be less


@dataclass(frozen=True)
class Fit:
    """Fitted bridges, and what they are worth.

    Args:
        bridges: in float32.
        ridges: the constant chosen for every gap.
        empty: how often the draft's first token is the target's, the gaps left empty, on rows that nothing was fitted to.
        bridged: the same with the bridges.
        rows: that gaps were fitted to, those left out as too far included.
        seconds: that it took.
    """

    bridges: Bridges
    ridges: dict[str, float]
    empty: float
    bridged: float
    rows: int
    seconds: float

    @property
    def helps(self) -> bool:
        """Whether the draft is better with them than without."""
        return self.bridged > self.empty


@dataclass(frozen=True)
class _Part:
    """Some rows, as the target's own pass left them: its states before the first layer and behind each."""

    pack: Pack
    positions: Tensor
    visible: list[Tensor]
    layers: list[Callable[[Tensor], Tensor]]
    states: list[Tensor]


class Calibration:
    """What bridges of a target are fitted to.

    Args:
        target: the model.
        continuations: its own continuations.
        most_bytes: of all that is kept and that reading and fitting take beside it, logits included, but bridges themselves;
            of more continuations, evenly spread ones are taken.
        max_rows: rows per pass.
        memory: of texts that the target has read, in which those that are read here are put as well.
        width: of the widest MLP that the budget is to suffice for.

    Raises:
        UnsupportedModel: the model's sub-layers cannot be skipped, or rows cannot be told apart in its attention.
        ValueError: not even one continuation fits the budget.
    """

    def __init__(
        self,
        target: Target,
        continuations: Sequence[Continuation],
        most_bytes: int,
        max_rows: int = 256,
        memory: Memory | None = None,
        width: int = 0,
    ) -> None:
        self.target = target
        self._model = RowModel(target.model)
        some = [continuation for continuation in continuations if continuation.starts > 1]
        self.continuations = afford(target, self._model, some, most_bytes, max_rows, width, memory)
        self._texts = Texts(self._model, target.vocabulary, self.continuations, Sampling(), memory=memory)
        self.starts = [(p, s) for p, continuation in enumerate(self.continuations) for s in range(continuation.starts)]
        packs = [self._pack(self.starts[i : i + max_rows]) for i in range(0, len(self.starts), max_rows)]
        self._texts.lay(max(packs, key=lambda pack: pack.end + pack.room))  # the one cache has room for all from now on
        self._parts = [self._read(pack) for pack in packs]

    @property
    def digest(self) -> str:
        """What tells it from others of the same target."""
        return digest_of(self.continuations)

    @property
    def nbytes(self) -> int:
        """What hidden states, keys and values take."""
        states = sum(state.numel() * state.element_size() for part in self._parts for state in part.states)
        return states + sum(text.cache.nbytes for text in self._texts.texts)

    @property
    def held(self) -> tuple[Continuation, ...]:
        """The continuations that :meth:`judge` looks at, of the first of them a part perhaps: not for learning from."""
        first = len(self.starts) - _judged(len(self.starts))
        return self.continuations[self.starts[first][0] :]

    def fit(self, shape: BridgeShape) -> Fit:
        """Fit the bridges of a mask: maps in closed form, and the MLPs of kind ``mlp`` to what those leave."""
        begin = time.monotonic()
        with torch.random.fork_rng(devices=[]):  # what a map of lower rank and an MLP begin from
            torch.manual_seed(0)
            bridges = Bridges(shape).to(self.target.device)
        ridges, rows = self._fit(bridges)
        empty, bridged = self.judge(bridges.mask, None), self.judge(bridges.mask, bridges)
        return Fit(bridges, ridges, empty, bridged, rows, time.monotonic() - begin)

    def _pack(self, starts: list[Start]) -> Pack:
        return self._texts.pack(starts, len(starts))

    @torch.inference_mode()
    def _read(self, pack: Pack) -> _Part:
        tokens = self._texts.tokens(pack.rows)
        visible, positions = self._texts.visible(pack, pack.rows, torch.arange(len(pack.rows)).to(tokens.device), [], 0)
        return _Part(pack, positions, visible, *self._model.layers_alone(tokens, positions, self._texts.lay(pack), visible))

    @torch.inference_mode()
    def _fit(self, bridges: Bridges) -> tuple[dict[str, float], int]:
        """The ridge constant of every gap, and how many rows they were fitted to."""
        ridges: dict[str, float] = {}
        parts, rows = self._learnt(bridges.mask.gaps)
        streams = [part.states[0] for part in parts]
        done, drifted = 0, False  # layers that the streams are through; whether they are still the target's own
        for gap, bridge in bridges.parts():
            whole, pairs = gap.kind == "layers", list[tuple[Tensor, Tensor]]()
            plain = not whole and self._plain(parts[0], gap)
            for number, part in enumerate(parts):
                stream = self._advance(part, streams[number], done, gap.first) if drifted else part.states[gap.first]
                streams[number] = stream
                behind = part.states[gap.last + 1]
                pairs.append((stream, behind - stream) if whole else self._around(part, stream, gap, plain))
            ridges[gap.name] = _regressed(bridge, pairs, rows)
            del pairs
            for number, part in enumerate(parts):
                if whole:
                    streams[number] = streams[number] + bridge(streams[number])
                else:
                    streams[number] = self._through(part, streams[number], gap, bridges)
            done, drifted = gap.last + 1, True
        return ridges, rows

    def _learnt(self, gaps: Sequence[Gap]) -> tuple[list[_Part], int]:
        """The parts that gaps are fitted to, evenly spread, and how many of their rows, the first ones: none is judged."""
        left, every = len(self.starts) - _judged(len(self.starts)), list[tuple[_Part, int]]()
        for part in self._parts:
            if left > 0:
                every.append((part, min(left, len(part.pack.rows))))
            left -= len(part.pack.rows)
        rows = sum(size for _, size in every)
        work = sum(_WORK[gap.kind] for gap in gaps)
        wanted = max(min(rows, _LEAST * self.target.hidden), rows * _SERVED // max(_SERVED, work))
        count = -(-wanted * len(every) // rows)
        some = [every[number * len(every) // count] for number in range(count)]
        return [part for part, _ in some], sum(size for _, size in some)

    def _advance(self, part: _Part, stream: Tensor, first: int, last: int) -> Tensor:
        """A stream through whole layers."""
        self._lay(part, SkipMask.none(self.target.layers))
        for layer in part.layers[first:last]:
            stream = layer(stream)
        return stream

    def _around(self, part: _Part, stream: Tensor, gap: Gap, plain: bool) -> tuple[Tensor, Tensor]:
        """What a single sub-layer's bridge reads in the draft, and what it should give: ``[1, R, H]`` each.

        Where the layer adds what its sub-layer gives as it is, the bridge also mends the drift before it.
        """
        layer = part.layers[gap.first]
        given = None if plain else self._given(part, gap)
        self._lay(part, _single(self.target.layers, gap))
        self._model.watch(gap.kind, gap.first)
        before, read = layer(stream), self._model.seen()[0]
        if given is None and gap.kind == "mlp":
            given = part.states[gap.first + 1] - before
        elif given is None:
            given = self._between(part, gap) - stream
        return read, given

    def _given(self, part: _Part, gap: Gap) -> Tensor:
        """What a sub-layer gives in the target itself."""
        self._lay(part, SkipMask.none(self.target.layers))
        self._model.watch(gap.kind, gap.first)
        part.layers[gap.first](part.states[gap.first])
        return self._model.seen()[1]

    def _between(self, part: _Part, gap: Gap) -> Tensor:
        """The target's state behind the attention of a gap's layer."""
        self._lay(part, _single(self.target.layers, Gap("mlp", gap.first, gap.first)))
        return part.layers[gap.first](part.states[gap.first])

    def _plain(self, part: _Part, gap: Gap) -> bool:
        """Whether a layer adds what its sub-layer gives as it is, or changes it on the way, as a norm behind it does."""
        layer, own = part.layers[gap.first], part.states[gap.first]
        if gap.kind == "attention":
            return _same(own + self._given(part, gap), self._between(part, gap))
        mask = _single(self.target.layers, gap)
        probe = Bridges(BridgeShape.of(self.target, mask, "mean")).to(own.device)
        known = torch.linspace(-1, 1, own.shape[-1], device=own.device) * own.float().square().mean().sqrt()
        probe.of(gap).bias.copy_(known)
        self._lay(part, mask, probe)
        added = layer(own)
        self._lay(part, mask)
        return _same(known.expand_as(own), (added - layer(own)).float())

    def _through(self, part: _Part, stream: Tensor, gap: Gap, bridges: Bridges) -> Tensor:
        """A stream through the layer of a bridged sub-layer."""
        self._lay(part, _single(self.target.layers, gap), bridges)
        return part.layers[gap.first](stream)

    def _lay(self, part: _Part, mask: SkipMask, bridges: Bridges | None = None) -> None:
        """Make ready for passes over a part's rows."""
        self._texts.lay(part.pack)
        of = torch.zeros(len(part.pack.rows), dtype=torch.int64, device=self.target.device)
        self._model.prepare(part.visible, [mask], of, bridges=[bridges])

    @torch.inference_mode()
    def judge(self, mask: SkipMask, bridges: Bridges | None) -> float:
        """How often the first drafted token is the target's, on the rows that were held out from the regressions.

        Args:
            mask: what drafts skip.
            bridges: of that mask, judged in the target's dtype, as they decode; None for empty skips.
        """
        bridges = None if bridges is None else bridges.decoding(self.target)
        left = judged = _judged(len(self.starts))
        right = 0
        for part in reversed(self._parts):
            rows, cache = part.pack.rows, self._texts.lay(part.pack)
            tokens, of = self._texts.tokens(rows), torch.zeros(len(rows), dtype=torch.int64, device=self.target.device)
            logits = self._model.run(tokens, part.positions, cache, part.visible, [mask], of, bridges=[bridges])
            own = self._texts.tokens([(p, s + 1) for p, s in rows])
            right += int((logits.argmax(-1) == own)[-left:].sum())
            left -= len(rows)
            if left <= 0:
                break
        return right / judged


def _regressed(bridge: Bridge, pairs: list[tuple[Tensor, Tensor]], rows: int) -> float:
    """Fit a bridge to the first rows of what it reads and should give, part by part; returns the ridge constant."""
    given = torch.cat([wanted[0] for _, wanted in pairs])[:rows].float()
    norms = given.norm(dim=-1)
    near = norms <= _FAR * norms.median()
    given = given[near]
    read = torch.cat([hidden[0] for hidden, _ in pairs])[:rows][near].float()
    return (learn if bridge.shape.width else regress)(bridge, read, given)


def _judged(rows: int) -> int:
    return max(1, min(int(_JUDGED * rows), _MOST_JUDGED))


def _single(layers: int, gap: Gap) -> SkipMask:
    """The mask of one sub-layer."""
    chosen = {gap.first}
    return SkipMask.of(layers, chosen if gap.kind == "attention" else set(), chosen if gap.kind == "mlp" else set())


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal but for the rounding of half precision."""
    return float((one - other).float().square().mean()) <= 1e-3 * float(one.float().square().mean())
