"""How shall the decoder decode? One frozen value that search proposes, measurement takes and export stores.

A configuration names a kind of drafter and that kind's own parameters, nothing else: a parameter that belongs to another
kind is refused by name, so that two configurations which decode alike are equal. No torch in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar

from .mask import MaskError, normalise
from .rules import (
    EXACT,
    NEVER,
    AcceptRule,
    ConfigError,
    StopRule,
    check_integer,
    check_number,
    check_type,
    refuse_foreign,
    refuse_unknown,
)

__all__ = ["AcceptRule", "ConfigError", "SpeculativeConfig", "StopRule"]


_COSTS = ("verify_cost", "draft_cost")


def _member(index: int, fields: Any) -> SpeculativeConfig:
    try:
        return SpeculativeConfig.from_dict(fields)
    except ConfigError as error:
        raise ConfigError(f"members.{index}.{error}") from None


def _check_members(members: Any) -> None:
    if not isinstance(members, tuple) or len(members) < 2:
        raise ConfigError("members: a cascade needs at least two configurations")
    for member in members:
        if not isinstance(member, SpeculativeConfig) or member.kind in ("none", "cascade") or not member.lossless:
            raise ConfigError(f"members: {member!r} is no configuration of a single drafter")


def _check_costs(name: str, costs: Any, least: float) -> None:
    if not isinstance(costs, tuple):
        raise ConfigError(f"{name}: {costs!r} is not a list of numbers")
    for cost in costs:
        check_number(name, cost, least, 1e6)


@dataclass(frozen=True)
class SpeculativeConfig:
    """One way to decode.

    Args:
        kind: ``none`` (plain decoding), ``layer_skip``, ``prompt_lookup``, ``retrieval``, ``token_recycling``,
            ``lookahead``, ``eagle``, ``medusa``, ``draft_model``, ``cross_tokenizer`` or ``cascade``.
        draft_length: the most tokens drafted per round, at least 1.
        mask: for ``layer_skip``: the skipped sub-layers in the text form of :mod:`layerskip.mask`.
        stop: for ``layer_skip``, ``eagle``, ``draft_model`` and ``cross_tokenizer``: when to stop before ``draft_length``.
        ngram_min: for ``prompt_lookup`` and ``retrieval``: the shortest n-gram looked up, at least 1.
        ngram_max: for both: the longest, tried first.
        match: for ``prompt_lookup``: of several matches in the context, the ``last`` or the ``first``.
        datastore: for ``retrieval``: the folder of a :class:`~layerskip.datastore.Datastore`; empty for none.
        tree_tokens: for ``retrieval``, ``token_recycling``, ``eagle`` and ``medusa``: the most tokens of a draft, a tree of
            at most ``draft_length`` in depth.
        candidates: for ``token_recycling``: so many successors of a token are kept; for ``lookahead``: so many n-grams; for
            ``eagle``: so many branches grow at once, each by so many tokens, and 1 drafts chains; for ``medusa``: so many
            tokens of each head.
        window: for ``lookahead``: so many guesses go through a pass in each of ``draft_length`` rows, at least 1.
        least_probability: for all kinds of trees: a branch ends where its probability falls below it, in [0, 1]; for
            ``layer_skip``: a sibling has at least this probability.
        bridge: for ``layer_skip``: the folder of what stands in for the skipped sub-layers of this mask; empty for nothing.
        draft_head: for ``layer_skip`` and ``draft_model``: the folder of the tokens that may be drafted; for
            ``cross_tokenizer``: of the draft's own; empty for all.
        siblings: for ``layer_skip``: so many other tokens may be verified beside each drafted one; 0 drafts chains.
        head: for ``eagle`` and ``medusa``: the folder of a trained head.
        draft: for ``draft_model`` and ``cross_tokenizer``: a hub id, folder or GGUF file, as ``load_target`` takes them.
        accept: for all that draft: which drafted tokens pass; any rule but ``exact`` changes the output.
        members: for ``cascade``: at least two configurations that draft. Where costs are not known, the first with a
            proposal drafts a round; one that a stop rule ended behind its first token, or that was found behind matches
            which have earned less, lately, than a member behind that runs no model, is taken only where the members behind
            have no better one; of several that look up, the one that promises more drafts.
        verify_cost: for ``cascade``: what verifying 1, 2, ... drafted tokens takes, in steps of plain decoding, as
            :func:`~layerskip.verify_timing.time_verification` measures; beyond its end it is taken to go on straight, and
            trees are taken to cost what chains do. Each round is then drafted by whoever brings most for what it takes:
            of what was looked up or recycled as many tokens are verified as pay, and nothing is drafted where nobody pays.
            Empty: it is not known, and nothing is declined; nor is it under a rule of acceptance that changes the output.
        draft_cost: for ``cascade`` whose ``verify_cost`` is known: what each member takes to draft one token of a chain, one
            level of a tree, or all levels where it drafts them at once, in steps of plain decoding, as
            :func:`~layerskip.draft_timing.time_drafting` measures; 0 for who finds drafts. Empty: it is not known, and who
            does not find drafts is asked where nothing that was found pays.

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
    verify_cost: tuple[float, ...] = ()
    draft_cost: tuple[float, ...] = ()

    _FIELDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "none": (),
        "layer_skip": ("mask", "bridge", "draft_head", "draft_length", "stop", "siblings", "least_probability"),
        "prompt_lookup": ("ngram_min", "ngram_max", "match", "draft_length"),
        "retrieval": ("datastore", "ngram_min", "ngram_max", "draft_length", "tree_tokens", "least_probability"),
        "token_recycling": ("draft_length", "tree_tokens", "candidates", "least_probability"),
        "lookahead": ("draft_length", "window", "candidates"),
        "eagle": ("head", "draft_length", "stop", "candidates", "tree_tokens", "least_probability"),
        "medusa": ("head", "draft_length", "candidates", "tree_tokens", "least_probability"),
        "draft_model": ("draft", "draft_head", "draft_length", "stop"),
        "cross_tokenizer": ("draft", "draft_head", "draft_length", "stop"),
        "cascade": ("members", "verify_cost", "draft_cost"),
    }

    def __post_init__(self) -> None:
        if self.kind not in self._FIELDS:
            raise ConfigError(f"kind: {self.kind!r} is not one of {', '.join(self._FIELDS)}")
        refuse_foreign(self, self._known(self.kind), f"kind {self.kind}")
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
        if self.kind == "layer_skip" and not self.siblings and self.least_probability != type(self).least_probability:
            raise ConfigError("least_probability: says nothing without siblings")
        if self.bridge and not self.mask:
            raise ConfigError("bridge: nothing is skipped that it could stand in for")
        if "draft" in self._FIELDS[self.kind] and not self.draft:
            raise ConfigError(f"draft: {self.kind} needs a hub id, a folder or a .gguf file")
        if "head" in self._FIELDS[self.kind] and not self.head:
            raise ConfigError(f"head: {self.kind} needs the folder of a trained head")
        if self.kind == "eagle" and self.candidates > 1 and self.stop.kind != "length":
            raise ConfigError("stop: a tree ends by its least_probability")
        for name in ("tree_tokens", "least_probability") if self.kind == "eagle" and self.candidates == 1 else ():
            if getattr(self, name) != getattr(type(self), name):
                raise ConfigError(f"{name}: says nothing of chains, which candidates: 1 asks for")
        if self.kind == "cascade":
            _check_members(self.members)
            _check_costs("verify_cost", self.verify_cost, 0.1)
            _check_costs("draft_cost", self.draft_cost, 0.0)
            if self.draft_cost and not self.verify_cost:
                raise ConfigError("draft_cost: says nothing where verify_cost is not known")
            if self.draft_cost and len(self.draft_cost) != len(self.members):
                raise ConfigError(f"draft_cost: {len(self.draft_cost)} numbers for {len(self.members)} members")
        try:
            object.__setattr__(self, "mask", normalise(self.mask))
        except MaskError as error:
            raise ConfigError(str(error)) from None

    @classmethod
    def _known(cls, kind: str) -> tuple[str, ...]:
        return ("kind", *cls._FIELDS[kind], *(("accept",) if kind != "none" else ()))

    @property
    def lossless(self) -> bool:
        """Whether the output is the target's own."""
        return self.accept.lossless

    @property
    def finds(self) -> bool:
        """Whether drafts are found in what was said before, so that drafting takes next to no time."""
        return self.kind in ("none", "prompt_lookup", "retrieval", "token_recycling")

    def to_dict(self) -> dict[str, Any]:
        """The fields that this kind reads, as plain values; ``from_dict`` reads them back to an equal configuration.

        Of siblings, bridges, draft heads and costs nothing is said where there are none, of trees nothing where chains are
        drafted. What changes the output says ``lossless: false``.
        """
        fields: dict[str, Any] = {"kind": self.kind}
        for name in self._FIELDS[self.kind]:
            if self.kind == "layer_skip" and not self.siblings and name in ("siblings", "least_probability"):
                continue
            if self.kind == "eagle" and self.candidates == 1 and name in ("tree_tokens", "least_probability"):
                continue
            value = getattr(self, name)
            if name in ("bridge", "draft_head", *_COSTS) and not value:
                continue
            fields[name] = value.to_dict() if isinstance(value, StopRule) else value
        if not self.lossless:
            fields |= {"accept": self.accept.to_dict(), "lossless": False}
        if self.members:
            fields["members"] = [member.to_dict() for member in self.members]
        return fields | {name: list(getattr(self, name)) for name in _COSTS if name in fields}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SpeculativeConfig:
        """Build from plain values; a key that ``kind`` does not know is refused by name.

        Raises:
            ConfigError: an unknown key, or a value out of range.
        """
        if not isinstance(fields, Mapping):
            raise ConfigError(f"config: {fields!r} is not a table of fields")
        kind = fields.get("kind", "none")
        if not isinstance(kind, str) or kind not in cls._FIELDS:
            raise ConfigError(f"kind: {kind!r} is not one of {', '.join(cls._FIELDS)}")
        refuse_unknown(fields, (*cls._known(kind), "lossless"), f"kind {kind}")
        values = dict(fields)
        said = values.pop("lossless", None)
        if "accept" in values:
            values["accept"] = AcceptRule.from_dict(values["accept"])
        if said is not None and said is not values.get("accept", AcceptRule()).lossless:
            raise ConfigError(f"lossless: {said!r} is not what its rule of acceptance makes it")
        if "stop" in values:
            values["stop"] = StopRule.from_dict(values["stop"])
        if "members" in values:
            if not isinstance(values["members"], Sequence) or isinstance(values["members"], str):
                raise ConfigError(f"members: {values['members']!r} is not a list of configurations")
            values["members"] = tuple(_member(index, member) for index, member in enumerate(values["members"]))
        for name in _COSTS:
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)

    def label(self) -> str:
        """A short name for tables and logs."""
        if self.kind == "none":
            return "no drafting"
        lossy = "" if self.lossless else f", LOSSY: {self.accept.kind}"
        if self.kind == "cascade":
            return "cascade: " + ", then ".join(member.label() for member in self.members) + lossy
        few = f", {PurePath(self.draft_head).name}" if self.draft_head else ""
        detail = {
            "layer_skip": (self.mask or "nothing skipped")
            + (f", bridged by {PurePath(self.bridge).name}" if self.bridge else "")
            + few
            + (f", {self.siblings} siblings from {self.least_probability:g}" if self.siblings else ""),
            "prompt_lookup": f"{self.ngram_min}-{self.ngram_max}-gram, {self.match} match",
            "retrieval": f"{self.ngram_min}-{self.ngram_max}-gram, {self.datastore or 'own texts'}, trees of "
            f"{self.tree_tokens} from {self.least_probability:g}",
            "token_recycling": f"trees of {self.tree_tokens}, {self.candidates} candidates, from {self.least_probability:g}",
            "lookahead": f"window of {self.window}, {self.candidates} candidates",
            "eagle": self.head + (f", trees of {self.tree_tokens}, {self.candidates} wide" if self.candidates > 1 else ""),
            "medusa": f"{self.head}, trees of {self.tree_tokens}, {self.candidates} candidates",
            "draft_model": self.draft + few,
            "cross_tokenizer": self.draft + few,
        }[self.kind]
        stop = "" if self.stop.kind == "length" else f", {self.stop.kind} {self.stop.threshold:g}"
        return f"{self.kind.replace('_', ' ')} ({detail}; length {self.draft_length}{stop}{lossy})"
