"""``SpeculativeConfig``: a frozen dataclass that defines how to decode. Does not import torch.

A configuration has a kind of drafter and the parameters of that kind. A parameter of another kind is refused by name, so
two configurations that decode alike are equal. Drafters register their kinds when they are imported
(:func:`layerskip.drafters.registry.register`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerskip.mask import MaskError, normalise
from layerskip.rules import (
    EXACT,
    NEVER,
    AcceptRule,
    ConfigError,
    Costs,
    StopRule,
    as_lists,
    as_tuples,
    check_integer,
    check_number,
    check_type,
    refuse_foreign,
    refuse_unknown,
)

__all__ = ["AcceptRule", "ConfigError", "Kind", "SpeculativeConfig", "StopRule", "add_kind", "kinds"]

_COSTS = ("verify_cost", "draft_cost")
_LEFT_OUT_IF_EMPTY = ("bridge", "draft_head", *_COSTS)


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: its fields, checks and label.

    Args:
        name: the value of ``SpeculativeConfig.kind``.
        fields: the fields of ``SpeculativeConfig`` that it reads, apart from ``kind`` and ``accept``.
        options: further fields of this kind alone, with their defaults; read by :meth:`SpeculativeConfig.option`.
        check: raises ``ConfigError`` for an invalid configuration of this kind.
        unused: the fields that a configuration of this kind does not read given its other values. They must keep their
            defaults, and ``to_dict`` leaves them out.
        label: what a configuration's label shows in parentheses.
        lookup: whether drafts are copied from earlier text without running a model, at almost no cost.
        trees_only: whether it drafts nothing but trees.
        benchmark: the fields that ``searches.benchmark`` measures it with, ``???`` for one that the user has to name. None
            leaves it out of the benchmark.
    """

    name: str
    fields: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[SpeculativeConfig], None] = lambda config: None
    unused: Callable[[SpeculativeConfig], Sequence[str]] = lambda config: ()
    label: Callable[[SpeculativeConfig], str] = lambda config: ""
    lookup: bool = False
    trees_only: bool = False
    benchmark: Mapping[str, Any] | None = None

    @property
    def known(self) -> tuple[str, ...]:
        """The names of all fields that a configuration of this kind may set."""
        return ("kind", *self.fields, *self.options, *(("accept",) if self.name != "none" else ()))


_KINDS: dict[str, Kind] = {"none": Kind("none", lookup=True)}


def add_kind(kind: Kind) -> None:
    """Register a kind of drafter; one of the same name is replaced."""
    _KINDS[kind.name] = kind


def kinds() -> Mapping[str, Kind]:
    """Return all known kinds by name, plain decoding (``none``) first."""
    return dict(_KINDS)


@dataclass(frozen=True)
class SpeculativeConfig:
    """One way to decode.

    Args:
        kind: ``none`` (plain decoding), ``layer_skip``, ``prompt_lookup``, ``retrieval``, ``token_recycling``,
            ``lookahead``, ``eagle``, ``medusa``, ``draft_model``, ``cross_tokenizer``, ``cascade``, or another
            registered kind.
        draft_length: the most tokens drafted per round, at least 1.
        mask: for ``layer_skip``: the skipped sub-layers in the text form of :mod:`layerskip.mask`.
        bridge: for ``layer_skip``: the folder of bridges that replace the skipped sub-layers; empty for none.
        draft_head: for ``layer_skip`` and ``draft_model``: the folder of a draft head, which reduces the vocabulary of
            drafts. For ``cross_tokenizer``: a draft head for the draft model. Empty for the whole vocabulary.
        stop: for ``layer_skip``, ``eagle``, ``draft_model`` and ``cross_tokenizer``: when to stop before ``draft_length``.
        ngram_min: for ``prompt_lookup`` and ``retrieval``: the shortest n-gram to look up, at least 1.
        ngram_max: for both: the longest n-gram, tried first.
        match: for ``prompt_lookup``: which of several matches to copy from, the ``last`` or the ``first``.
        datastore: for ``retrieval``: the folder of a :class:`~layerskip.drafters.datastore.Datastore`; empty for none.
        tree_tokens: for ``retrieval``, ``token_recycling``, ``eagle`` and ``medusa``: the most tokens of a draft tree, which
            is at most ``draft_length`` deep.
        candidates: for ``token_recycling``: how many successors are kept of each token. For ``lookahead``: how many
            n-grams. For ``eagle``: how many branches grow per level, and by how many tokens each; 1 drafts chains. For
            ``medusa``: how many tokens of each head.
        window: for ``lookahead``: how many guesses each of the ``draft_length`` rows of its window holds, at least 1.
        siblings: for ``layer_skip``: how many alternatives to each drafted token may be verified; 0 drafts chains.
        least_probability: for trees: a branch ends where its probability falls below this value, in [0, 1]. For
            ``layer_skip``: the least probability of a sibling.
        head: for ``eagle`` and ``medusa``: the folder of a trained head.
        draft: for ``draft_model`` and ``cross_tokenizer``: a hub id, a folder or a GGUF file, as in ``load_target``.
        accept: for all kinds that draft: the acceptance rule. Any rule but ``exact`` changes the output.
        members: for ``cascade``: at least two configurations that draft. Without costs, the first member with a proposal
            drafts the round. See :class:`~layerskip.drafters.cascade.Cascade` for the order of proposals.
        verify_cost: for ``cascade``: the cost of verifying 1, 2, ... drafted tokens, in steps of plain decoding, as
            measured by :func:`~layerskip.costs.verify_timing.time_verification`. Longer drafts are extrapolated linearly,
            and trees cost what chains of the same size cost. With it, each round is drafted by the member with the best
            ratio of expected tokens to cost (:class:`~layerskip.drafters.priced_cascade.PricedCascade`). Where contexts
            differ much, pairs of a context and the costs there. Empty if unknown; not used by acceptance rules that change
            the output.
        draft_cost: for ``cascade`` with a ``verify_cost``: the cost of drafting one token of a chain or one level
            of a tree (all levels if drafted in one pass) for each member, in steps of plain decoding, as measured by
            :func:`~layerskip.costs.draft_timing.time_drafting`; 0 for lookups. Pairs as above are possible. Empty if
            unknown.
        options: further fields declared by a registered kind, as pairs of name and value.

    Raises:
        ConfigError: a value is out of range, or a field is set that ``kind`` does not read.
    """

    kind: str = "none"
    draft_length: int = 4
    mask: str = ""
    bridge: str = ""
    draft_head: str = ""
    stop: StopRule = NEVER
    ngram_min: int = 1
    ngram_max: int = 3
    match: str = "last"
    datastore: str = ""
    tree_tokens: int = 8
    candidates: int = 4
    window: int = 5
    siblings: int = 0
    least_probability: float = 0.05
    head: str = ""
    draft: str = ""
    accept: AcceptRule = EXACT
    members: tuple[SpeculativeConfig, ...] = ()
    verify_cost: Costs = ()
    draft_cost: Costs = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        kind = _kind(self.kind)
        refuse_foreign(self, (*kind.known, "options"), f"kind {self.kind}")
        refuse_unknown(dict(self.options), tuple(kind.options), f"kind {self.kind}")
        given = dict(kind.options) | dict(self.options)  # so that two configurations that decode alike are equal
        object.__setattr__(self, "options", tuple((name, given[name]) for name in kind.options))
        check_integer("draft_length", self.draft_length, 1)
        for name in ("ngram_min", "ngram_max", "tree_tokens", "candidates", "window"):
            check_integer(name, getattr(self, name), 1)
        check_integer("siblings", self.siblings, 0)
        check_number("least_probability", self.least_probability, 0.0, 1.0)
        if self.ngram_max < self.ngram_min:
            raise ConfigError(f"ngram_max: {self.ngram_max} is below ngram_min, {self.ngram_min}")
        if self.match not in ("last", "first"):
            raise ConfigError(f"match: {self.match!r} is neither 'last' nor 'first'")
        check_type("stop", self.stop, StopRule)
        check_type("accept", self.accept, AcceptRule)
        for name in ("mask", "bridge", "draft_head", "draft", "head", "datastore"):
            check_type(name, getattr(self, name), str)
        if "draft" in kind.fields and not self.draft:
            raise ConfigError(f"draft: {self.kind} needs a hub id, a folder or a .gguf file")
        if "head" in kind.fields and not self.head:
            raise ConfigError(f"head: {self.kind} needs the folder of a trained head")
        kind.check(self)
        for name in kind.unused(self):
            if getattr(self, name) != getattr(type(self), name):
                raise ConfigError(f"{name}: has no effect in this configuration of {self.kind}")
        try:
            object.__setattr__(self, "mask", normalise(self.mask))
        except MaskError as error:
            raise ConfigError(str(error)) from None

    def option(self, name: str) -> Any:
        """Return the value of a field that the kind declares in ``options``.

        Raises:
            KeyError: the kind declares no such field.
        """
        return dict(self.options)[name]

    @property
    def lossless(self) -> bool:
        """True if the output follows the target's own distribution."""
        return self.accept.lossless

    @property
    def lookup(self) -> bool:
        """True if drafts are copied from earlier text, at almost no cost."""
        return _kind(self.kind).lookup

    @property
    def finds(self) -> bool:
        """The earlier name of :attr:`lookup`."""
        return self.lookup

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that this kind reads, as plain values; ``from_dict`` makes an equal configuration from them.

        Empty bridges, draft heads and costs are left out, and so are fields without effect. An acceptance rule that
        changes the output adds ``lossless: false``.
        """
        kind = _kind(self.kind)
        unused = kind.unused(self)
        fields: dict[str, Any] = {"kind": self.kind}
        for name in kind.fields:
            value = getattr(self, name)
            if name in unused or (name in _LEFT_OUT_IF_EMPTY and not value):
                continue
            if name == "members":
                value = [member.to_dict() for member in value]
            fields[name] = value.to_dict() if isinstance(value, StopRule) else as_lists(value) if name in _COSTS else value
        fields |= {name: self.option(name) for name in kind.options}
        if not self.lossless:
            fields |= {"accept": self.accept.to_dict(), "lossless": False}
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SpeculativeConfig:
        """Build from plain values; a key that ``kind`` does not know is refused by name.

        Raises:
            ConfigError: an unknown key, or a value out of range.
        """
        if not isinstance(fields, Mapping):
            raise ConfigError(f"config: {fields!r} is not a table of fields")
        kind = _kind(fields.get("kind", "none"))
        refuse_unknown(fields, (*kind.known, "lossless"), f"kind {kind.name}")
        values = dict(fields)
        lossless = values.pop("lossless", None)
        if "accept" in values:
            values["accept"] = AcceptRule.from_dict(values["accept"])
        if lossless is not None and lossless is not values.get("accept", AcceptRule()).lossless:
            raise ConfigError(f"lossless: {lossless!r} contradicts the acceptance rule")
        if "stop" in values:
            values["stop"] = StopRule.from_dict(values["stop"])
        if "members" in values:
            if not isinstance(values["members"], Sequence) or isinstance(values["members"], str):
                raise ConfigError(f"members: {values['members']!r} is not a list of configurations")
            values["members"] = tuple(_member(index, member) for index, member in enumerate(values["members"]))
        for name in _COSTS:
            if isinstance(values.get(name), list):
                values[name] = as_tuples(values[name])
        own = tuple((name, values.pop(name)) for name in kind.options if name in values)
        return cls(**values, options=own)

    def label(self) -> str:
        """Return a short name for tables and logs."""
        if self.kind == "none":
            return "no drafting"
        lossy = "" if self.lossless else f", LOSSY: {self.accept.kind}"
        detail = _kind(self.kind).label(self)
        if self.members:
            return f"{self.kind}: {detail}{lossy}"
        stop = "" if self.stop.kind == "length" else f", {self.stop.kind} {self.stop.threshold:g}"
        length = f"length {self.draft_length}{stop}" if "draft_length" in _kind(self.kind).fields else ""
        shown = "; ".join(filter(None, (detail, (length + lossy).removeprefix(", "))))
        return self.kind.replace("_", " ") + (f" ({shown})" if shown else "")


def _kind(name: Any) -> Kind:
    if not isinstance(name, str) or name not in _KINDS:
        raise ConfigError(f"kind: {name!r} is not one of {', '.join(_KINDS)}")
    return _KINDS[name]


def _member(index: int, fields: Any) -> SpeculativeConfig:
    try:
        return SpeculativeConfig.from_dict(fields)
    except ConfigError as error:
        raise ConfigError(f"members.{index}.{error}") from None
