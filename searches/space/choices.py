"""The ranges and lists that a study's parameters are chosen from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from layerskip import MaskError, SkipMask, SpeculativeConfig
from layerskip.rules import Costs
from searches.app.checks import InputError, check_flag, check_list, check_whole
from searches.space.bridge_spec import BRIDGES, BridgeSource

STOPS = ("length", "threshold", "adaptive")
MATCHES = ("last", "first")
LEAST_PROBABILITY = (0.005, 0.5)
Range = tuple[int, int]
Params = dict[str, int | float | str]
DraftCost = Callable[[Sequence[SpeculativeConfig]], Costs]
"""The cost that each member of a cascade has for one drafted token, in steps of plain decoding; empty if unknown."""

_RUNTIME = {"runtime": True}  # measured or made by the program, not configured
_RANGES = (
    *("skip_length", "lookup_length", "ngram", "tree_length", "tree_tokens"),
    *("candidates", "lookahead_length", "window", "model_length"),
)
_KNOWN = {"stops": STOPS, "matches": MATCHES, "bridges": BRIDGES}
_FILLED = ("stops", "matches", "bridges", "ranks", "widths", "draft_heads")
_LISTS = (*_FILLED, "datastores", "eagle_heads", "medusa_heads", "drafts", "cross_drafts", "masks")


@dataclass(frozen=True)
class Choices:
    """Everything that a study may choose from, for one target.

    Args:
        layers: the number of decoder layers of the target.
        kinds: the drafters to choose from; None for all. ``none`` is always among them.
        protect_first: this many first layers are never skipped.
        protect_last: this many last layers are never skipped.
        skip_length: shortest and longest draft of ``layer_skip``.
        siblings: the most alternatives to each drafted token that ``layer_skip`` may verify; 0 searches chains only.
        bridges: what may stand in for skipped sub-layers: ``none``, ``mean``, ``linear``, ``mlp``.
        ranks: of the maps of ``linear`` and ``mlp`` bridges; 0 is a full-rank map.
        widths: of the MLPs of ``mlp`` bridges.
        draft_heads: sizes of the vocabulary that self-drafts and draft models choose from; 0 is the whole vocabulary.
        stops: the stop rules of ``layer_skip``, ``eagle``, ``draft_model`` and ``cross_tokenizer``.
        matches: which of several matches ``prompt_lookup`` copies from: the ``last``, the ``first``.
        lookup_length: shortest and longest draft of ``prompt_lookup``; least and greatest depth of ``retrieval``'s trees.
        ngram: shortest and longest n-gram of ``prompt_lookup`` and ``retrieval``.
        tree_length: least and greatest depth of the trees of ``token_recycling``.
        tree_tokens: fewest and most tokens of a tree of ``token_recycling``, ``retrieval``, ``eagle`` and ``medusa``.
        candidates: fewest and most successors, or n-grams, kept of a token.
        lookahead_length: shortest and longest draft of ``lookahead``.
        window: fewest and most guesses in each row of the window of ``lookahead``.
        datastores: the datastores that ``retrieval`` chooses from, and none.
        eagle_heads: folders of trained heads; without any, ``eagle`` is left out.
        medusa_heads: folders of trained heads; without any, ``medusa`` is left out.
        drafts: draft models; without any, ``draft_model`` is left out.
        cross_drafts: draft models of another tokenizer; without any, ``cross_tokenizer`` is left out.
        model_length: shortest and longest draft of draft models and heads.
        masks: further masks to try first, in text form.
        ranges: ranges of the parameters of kinds that were added to these, by name.
        allow_lossy: whether acceptance rules that change the output are searched, too, and may win.
        trees: whether the target can verify trees. Otherwise kinds that draft only trees are left out, and ``eagle`` drafts
            chains.
        verify_cost: the cost of verification in cascades; empty if it was not measured.
        draft_cost: the cost of drafting by members of cascades; None if it is not measured.
        bridge_store: the source of bridges and draft heads; without it there are none.
    """

    layers: int = field(metadata=_RUNTIME)
    kinds: Sequence[str] | None = None
    protect_first: int = 2
    protect_last: int = 2
    skip_length: Range = (1, 8)
    siblings: int = 2
    bridges: Sequence[str] = ("none",)
    ranks: Sequence[int] = (0,)
    widths: Sequence[int] = (512,)
    draft_heads: Sequence[int] = (0,)
    stops: Sequence[str] = STOPS
    matches: Sequence[str] = MATCHES
    lookup_length: Range = (2, 16)
    ngram: Range = (1, 4)
    tree_length: Range = (2, 8)
    tree_tokens: Range = (4, 24)
    candidates: Range = (2, 8)
    lookahead_length: Range = (1, 4)
    window: Range = (1, 8)
    datastores: Sequence[str] = ()
    eagle_heads: Sequence[str] = ()
    medusa_heads: Sequence[str] = ()
    drafts: Sequence[str] = ()
    cross_drafts: Sequence[str] = ()
    model_length: Range = (1, 8)
    masks: Sequence[str] = ()
    ranges: Mapping[str, Range] = field(default_factory=dict)
    allow_lossy: bool = False
    trees: bool = field(default=True, metadata=_RUNTIME)
    verify_cost: Costs = field(default=(), metadata=_RUNTIME)
    draft_cost: DraftCost | None = field(default=None, repr=False, compare=False, metadata=_RUNTIME)
    bridge_store: BridgeSource | None = field(default=None, repr=False, compare=False, metadata=_RUNTIME)

    def __post_init__(self) -> None:
        for name in _LISTS:
            check_list(f"space.{name}", getattr(self, name), _KNOWN.get(name), or_empty=name not in _FILLED)
        for name, least in (("ranks", 0), ("widths", 1), ("draft_heads", 0)):
            for value in getattr(self, name):
                check_whole(f"space.{name}", value, least)
        for name in _RANGES:
            _check_range(f"space.{name}", getattr(self, name))
        for name, bounds in self.ranges.items():
            _check_range(f"space.ranges.{name}", bounds)
        for name, plain in (("bridges", "none"), ("draft_heads", 0)):  # the plain choice is always there
            object.__setattr__(self, name, tuple(dict.fromkeys([plain, *getattr(self, name)])))
        check_flag("allow_lossy", self.allow_lossy)
        for name in ("siblings", "protect_first", "protect_last"):
            check_whole(f"space.{name}", getattr(self, name), 0)
        for mask in self.masks:
            try:
                parsed = SkipMask.parse(str(mask), self.layers)
            except MaskError as error:
                raise InputError(f"space.masks: {mask!r}: {error}") from None
            outside = [i for i in range(self.layers) if (parsed.attention[i] or parsed.mlp[i]) and i not in self.skippable]
            if outside:
                raise InputError(f"space.masks: {mask!r} skips layer {outside[0]}, which is protected")

    @property
    def skippable(self) -> tuple[int, ...]:
        """The layers that are not protected."""
        return tuple(range(self.protect_first, self.layers - self.protect_last))

    @property
    def models(self) -> dict[str, Sequence[str]]:
        """The draft models of each kind that needs some."""
        return {"draft_model": self.drafts, "cross_tokenizer": self.cross_drafts}

    @property
    def heads(self) -> dict[str, Sequence[str]]:
        """The trained heads of each kind that needs some."""
        return {"eagle": self.eagle_heads, "medusa": self.medusa_heads}

    def range(self, name: str, default: Range) -> Range:
        """Return the range of a parameter of a kind that was added: from ``ranges``, or else its default."""
        low, high = self.ranges.get(name, default)
        return low, high


def clip(*wanted: tuple[int, Range]) -> list[int]:
    """Return each value, or the nearest end of its range."""
    return [min(max(value, low), high) for value, (low, high) in wanted]


def _check_range(name: str, bounds: object) -> None:
    pair = isinstance(bounds, Sequence) and len(bounds) == 2 and all(type(bound) is int for bound in bounds)
    if not pair or not 1 <= bounds[0] <= bounds[1]:  # type: ignore[index]
        raise InputError(f"{name}: {bounds} is not a range of whole numbers from 1 on, such as [1,8]")
