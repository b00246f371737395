"""How shall the decoder decode? One frozen value that search proposes, measurement takes and export stores.

A configuration names a kind of drafter and that kind's own parameters, nothing else: a parameter that belongs to another
kind is refused by name, so that two configurations which decode alike are equal. No torch in here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .mask import MaskError, normalise


class ConfigError(ValueError):
    """A configuration that cannot be obeyed; the message names the field."""


def _refuse_unknown(fields: Mapping[str, Any], known: tuple[str, ...], owner: str, prefix: str = "") -> None:
    for name in fields:
        if name not in known:
            raise ConfigError(f"{prefix}{name}: not a field of {owner}; it has {', '.join(known)}")


def _check_type(name: str, value: Any, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise ConfigError(f"{name}: {value!r} is not a {wanted.__name__}")


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: {value!r} is not a whole number of at least {least}")


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ConfigError(f"{name}: {value!r} is not a number from {least:g} to {most:g}")


@dataclass(frozen=True)
class StopRule:
    """When does a drafter stop before ``draft_length``?

    ``length``: never. ``threshold``: after a drafted token whose confidence (the draft's probability of its most likely
    token) is below ``threshold``. ``adaptive``: the same, with a threshold that follows the acceptance rate as in Draft &
    Verify (arXiv 2309.08168), section 3.3: after every round ``rate = acceptance_decay * rate + (1 - acceptance_decay) *
    accepted / drafted``; the threshold moves up by ``step`` where the rate is at most ``target_acceptance``, else down,
    smoothed by ``threshold_decay``.

    Args:
        kind: ``length``, ``threshold`` or ``adaptive``.
        threshold: confidence in [0, 1]; for ``adaptive`` the first one.
        target_acceptance: acceptance rate that ``adaptive`` steers to, in [0, 1].
        step: how far ``adaptive`` moves the threshold per round, in [0, 1].
        acceptance_decay: weight of the past in the acceptance rate, in [0, 1].
        threshold_decay: weight of the past in the threshold, in [0, 1].
        carry: whether ``adaptive`` carries its threshold from prompt to prompt, or starts each anew.
    """

    kind: str = "length"
    threshold: float = 0.6
    target_acceptance: float = 0.9
    step: float = 0.01
    acceptance_decay: float = 0.5
    threshold_decay: float = 0.9
    carry: bool = True

    _FIELDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "length": (),
        "threshold": ("threshold",),
        "adaptive": ("threshold", "target_acceptance", "step", "acceptance_decay", "threshold_decay", "carry"),
    }

    def __post_init__(self) -> None:
        if self.kind not in self._FIELDS:
            raise ConfigError(f"stop.kind: {self.kind!r} is not one of {', '.join(self._FIELDS)}")
        for stray in dataclasses.fields(self):
            if stray.name not in ("kind", *self._FIELDS[self.kind]) and getattr(self, stray.name) != stray.default:
                raise ConfigError(f"stop.{stray.name}: does not belong to stop rule {self.kind}")
        for name in self._FIELDS["adaptive"][:-1]:
            _check_number(f"stop.{name}", getattr(self, name), 0.0, 1.0)
        _check_type("stop.carry", self.carry, bool)

    def to_dict(self) -> dict[str, Any]:
        """The fields that this kind of rule reads, as plain values."""
        return {"kind": self.kind} | {name: getattr(self, name) for name in self._FIELDS[self.kind]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any] | str) -> StopRule:
        """Build from plain values, or from the name of a kind alone; unknown and foreign fields are refused by name."""
        if isinstance(fields, str):
            return cls(kind=fields)
        if not isinstance(fields, Mapping):
            raise ConfigError(f"stop: {fields!r} is neither the name of a rule nor a table of its fields")
        kind = fields.get("kind", "length")
        if not isinstance(kind, str) or kind not in cls._FIELDS:
            raise ConfigError(f"stop.kind: {kind!r} is not one of {', '.join(cls._FIELDS)}")
        _refuse_unknown(fields, ("kind", *cls._FIELDS[kind]), f"stop rule {kind}", "stop.")
        return cls(**fields)


def _member(index: int, fields: Any) -> SpeculativeConfig:
    try:
        return SpeculativeConfig.from_dict(fields)
    except ConfigError as error:
        raise ConfigError(f"members.{index}.{error}") from None


def _check_members(members: Any) -> None:
    if not isinstance(members, tuple) or len(members) < 2:
        raise ConfigError("members: a cascade needs at least two configurations")
    for member in members:
        if not isinstance(member, SpeculativeConfig) or member.kind in ("none", "cascade"):
            raise ConfigError(f"members: {member!r} is no configuration of a single drafter")


@dataclass(frozen=True)
class SpeculativeConfig:
    """One way to decode.

    Args:
        kind: ``none`` (plain decoding), ``layer_skip``, ``prompt_lookup``, ``retrieval``, ``token_recycling``,
            ``lookahead``, ``draft_model``, ``cross_tokenizer`` or ``cascade``.
        draft_length: the most tokens drafted per round, at least 1.
        mask: for ``layer_skip``: the skipped sub-layers in the text form of :mod:`layerskip.mask`.
        stop: for ``layer_skip``, ``draft_model`` and ``cross_tokenizer``: when to stop before ``draft_length``.
        ngram_min: for ``prompt_lookup`` and ``retrieval``: the shortest n-gram looked up, at least 1.
        ngram_max: for both: the longest, tried first.
        match: for ``prompt_lookup``: of several matches in the context, the ``last`` or the ``first``.
        datastore: for ``retrieval``: the folder of a :class:`~layerskip.datastore.Datastore`; empty for none.
        tree_tokens: for ``retrieval`` and ``token_recycling``: the most tokens of a draft, a tree of at most
            ``draft_length`` in depth.
        candidates: for ``token_recycling``: so many successors of a token are kept; for ``lookahead``: so many n-grams.
        window: for ``lookahead``: so many guesses go through a pass in each of ``draft_length`` rows, at least 1.
        least_probability: for both kinds of trees: a branch ends where its probability falls below it, in [0, 1]; for
            ``layer_skip``: a sibling has at least this probability.
        siblings: for ``layer_skip``: so many other tokens may be verified beside each drafted one; 0 drafts chains.
        draft: for ``draft_model`` and ``cross_tokenizer``: a hub id, folder or GGUF file, as ``load_target`` takes them.
        members: for ``cascade``: at least two configurations that draft; the first with a proposal drafts a round.

    Raises:
        ConfigError: a value is out of range, or a field is set that ``kind`` does not read.
    """

    kind: str = "none"
    draft_length: int = 4
    mask: str = ""
    stop: StopRule = StopRule()
    ngram_min: int = 1
    ngram_max: int = 3
    match: str = "last"
    datastore: str = ""
    tree_tokens: int = 8
    candidates: int = 4
    window: int = 5
    siblings: int = 0
    least_probability: float = 0.05
    draft: str = ""
    members: tuple[SpeculativeConfig, ...] = ()

    _FIELDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "none": (),
        "layer_skip": ("mask", "draft_length", "stop", "siblings", "least_probability"),
        "prompt_lookup": ("ngram_min", "ngram_max", "match", "draft_length"),
        "retrieval": ("datastore", "ngram_min", "ngram_max", "draft_length", "tree_tokens", "least_probability"),
        "token_recycling": ("draft_length", "tree_tokens", "candidates", "least_probability"),
        "lookahead": ("draft_length", "window", "candidates"),
        "draft_model": ("draft", "draft_length", "stop"),
        "cross_tokenizer": ("draft", "draft_length", "stop"),
        "cascade": ("members",),
    }

    def __post_init__(self) -> None:
        if self.kind not in self._FIELDS:
            raise ConfigError(f"kind: {self.kind!r} is not one of {', '.join(self._FIELDS)}")
        for field in dataclasses.fields(self):
            foreign = field.name not in ("kind", *self._FIELDS[self.kind])
            if foreign and getattr(self, field.name) != field.default:
                raise ConfigError(f"{field.name}: does not belong to kind {self.kind}")
        _check_integer("draft_length", self.draft_length, 1)
        for name in ("ngram_min", "ngram_max", "tree_tokens", "candidates", "window"):
            _check_integer(name, getattr(self, name), 1)
        _check_integer("siblings", self.siblings, 0)
        _check_number("least_probability", self.least_probability, 0.0, 1.0)
        if self.ngram_max < self.ngram_min:
            raise ConfigError(f"ngram_max: {self.ngram_max} is below ngram_min, {self.ngram_min}")
        if self.match not in ("last", "first"):
            raise ConfigError(f"match: {self.match!r} is neither 'last' nor 'first'")
        _check_type("stop", self.stop, StopRule)
        _check_type("mask", self.mask, str)
        _check_type("draft", self.draft, str)
        _check_type("datastore", self.datastore, str)
        if self.kind == "layer_skip" and not self.siblings and self.least_probability != type(self).least_probability:
            raise ConfigError("least_probability: says nothing without siblings")
        if "draft" in self._FIELDS[self.kind] and not self.draft:
            raise ConfigError(f"draft: {self.kind} needs a hub id, a folder or a .gguf file")
        if self.kind == "cascade":
            _check_members(self.members)
        try:
            object.__setattr__(self, "mask", normalise(self.mask))
        except MaskError as error:
            raise ConfigError(str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        """The fields that this kind reads, as plain values; ``from_dict`` reads them back to an equal configuration.

        Of siblings nothing is said where there are none.
        """
        fields: dict[str, Any] = {"kind": self.kind}
        for name in self._FIELDS[self.kind]:
            if self.kind == "layer_skip" and not self.siblings and name in ("siblings", "least_probability"):
                continue
            value = getattr(self, name)
            fields[name] = value.to_dict() if isinstance(value, StopRule) else value
        if self.members:
            fields["members"] = [member.to_dict() for member in self.members]
        return fields

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
        _refuse_unknown(fields, ("kind", *cls._FIELDS[kind]), f"kind {kind}")
        values = dict(fields)
        if "stop" in values:
            values["stop"] = StopRule.from_dict(values["stop"])
        if "members" in values:
            if not isinstance(values["members"], Sequence) or isinstance(values["members"], str):
                raise ConfigError(f"members: {values['members']!r} is not a list of configurations")
            values["members"] = tuple(_member(index, member) for index, member in enumerate(values["members"]))
        return cls(**values)

    def label(self) -> str:
        """A short name for tables and logs."""
        if self.kind == "none":
            return "no drafting"
        if self.kind == "cascade":
            return "cascade: " + ", then ".join(member.label() for member in self.members)
        detail = {
            "layer_skip": (self.mask or "nothing skipped")
            + (f", {self.siblings} siblings from {self.least_probability:g}" if self.siblings else ""),
            "prompt_lookup": f"{self.ngram_min}-{self.ngram_max}-gram, {self.match} match",
            "retrieval": f"{self.ngram_min}-{self.ngram_max}-gram, {self.datastore or 'own texts'}, trees of "
            f"{self.tree_tokens} from {self.least_probability:g}",
            "token_recycling": f"trees of {self.tree_tokens}, {self.candidates} candidates, from {self.least_probability:g}",
            "lookahead": f"window of {self.window}, {self.candidates} candidates",
            "draft_model": self.draft,
            "cross_tokenizer": self.draft,
        }[self.kind]
        stop = "" if self.stop.kind == "length" else f", {self.stop.kind} {self.stop.threshold:g}"
        return f"{self.kind.replace('_', ' ')} ({detail}; length {self.draft_length}{stop})"
