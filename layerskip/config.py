"""``SpeculativeConfig``: a frozen dataclass that defines how to decode, and the declarations that it is checked by.

A configuration has a method and the fields of that method. A field of another method is refused by name, so two
configurations that decode alike are equal. The class of a drafter (:class:`layerskip.decoding.drafter.Drafter`) declares its
:class:`Method`, from which checks, search spaces, benchmarks, colours and documentation follow. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from layerskip.draft_plan import DraftPlan, PlanError, normalise_mask

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # the last are bytes that are not UTF-8


class ConfigError(ValueError):
    """An invalid configuration. The message begins with the field."""


def refuse_unknown(fields: Mapping[str, Any], known: tuple[str, ...], owner: str, prefix: str = "") -> None:
    """Raise ``ConfigError`` for a field that is not known; the message names the owner, and the field with a prefix."""
    for name in fields:
        if name not in known:
            raise ConfigError(f"{prefix}{name}: not a field of {owner}; it has {', '.join(known)}")


def _refuse_foreign(value: Any, known: tuple[str, ...], owner: str, prefix: str = "") -> None:
    """Raise ``ConfigError`` for a field of a dataclass that is set but not known."""
    for each in dataclasses.fields(value):
        if each.name not in known and getattr(value, each.name) != each.default:
            raise ConfigError(f"{prefix}{each.name}: does not belong to {owner}")


def check_type(name: str, value: Any, expected: type) -> None:
    """Raise ``ConfigError`` for a value of another type."""
    if not isinstance(value, expected):
        raise ConfigError(f"{name}: {value!r} is not a {expected.__name__}")


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Raise ``ConfigError`` for a value that is not an integer from ``minimum`` to ``maximum``; None for no limit."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name}: {value!r} is not a whole number of at least {minimum}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{name}: {value} is more than {maximum}")


def check_text(name: str, value: str) -> None:
    """Raise ``ConfigError`` for a name or path with characters that a terminal obeys or a file cannot hold."""
    if _CONTROLS.search(value):
        raise ConfigError(f"{name}: {value!r} has characters that cannot be printed")


def check_number(name: str, value: Any, minimum: float, maximum: float) -> None:
    """Raise ``ConfigError`` for a value that is not a number from ``minimum`` to ``maximum``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= maximum:
        raise ConfigError(f"{name}: {value!r} is not a number from {minimum:g} to {maximum:g}")


Costs = tuple[float, ...]
"""Costs in steps of plain decoding."""


@dataclass(frozen=True)
class StopRule:
    """The condition under which a drafter stops before ``num_speculative_tokens``.

    ``length``: never. ``threshold``: after a drafted token whose confidence (the draft's probability of its most likely
    token) is below ``threshold``. ``adaptive``: as ``threshold``, with a threshold that follows the acceptance rate as in
    Draft & Verify (arXiv 2309.08168), section 3.3, from ``threshold`` on, from prompt to prompt until the drafter is reset.
    """

    method: str = "length"
    threshold: float = 0.6

    def __post_init__(self) -> None:
        _refuse_foreign(self, self._known(self.method), f"stop rule {self.method}", "stop.")
        check_number("stop.threshold", self.threshold, 0.0, 1.0)

    @staticmethod
    def _known(method: Any) -> tuple[str, ...]:
        """Return the fields that a method reads."""
        known = ("length", "threshold", "adaptive")
        if method not in known:
            raise ConfigError(f"stop.method: {method!r} is not one of {', '.join(known)}")
        return ("method",) if method == "length" else ("method", "threshold")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that the method reads, as plain values."""
        return {name: getattr(self, name) for name in self._known(self.method)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any] | str) -> StopRule:
        """Build from plain values or from the name of a method alone."""
        if isinstance(fields, str):
            fields = {"method": fields}
        if not isinstance(fields, Mapping):
            raise ConfigError(f"stop: {fields!r} is neither the name of a rule nor a table of its fields")
        method = fields.get("method", cls.method)
        refuse_unknown(fields, cls._known(method), f"stop rule {method}", "stop.")
        return cls(**fields)


NEVER = StopRule()
"""The stop rule without early stopping."""


@dataclass(frozen=True)
class Field:
    """A field of a drafter's configuration: its values, its meaning, and how a study chooses it.

    Values have the type of the default. Whole numbers are at least 1, or 0 if that is the default; others are from 0 to 1.
    """

    name: str
    default: Any  # the value where none is given
    meaning: str  # one phrase for the documentation
    range: tuple[float, float] | None = None  # lowest and highest value that a study chooses; None if it chooses no number
    log: bool = False  # whether a study chooses on a logarithmic scale
    choices: tuple[str | int, ...] = ()  # a study's choices; texts of a field that is neither path nor plan have no others
    first: Any = None  # the value in the first configuration of a study and in the benchmark; None for the default
    at_least: str = ""  # the name of a field that precedes this one in its method, and whose value is a lower bound
    used: Callable[[SpeculativeConfig], bool] = lambda config: True  # whether it is read; otherwise it must keep its default
    path: bool = False  # whether it names a file, a folder or a model. A study chooses from those that its user names
    required: bool = False  # whether a path must be given
    normalise: Callable[[str], str] | None = None  # canonical form of any other text that is a value; a PlanError refuses it

    def check(self, config: SpeculativeConfig) -> None:
        """Raise ``ConfigError`` for an invalid value."""
        value = config.value(self.name)
        if isinstance(self.default, (bool, str, StopRule)):
            check_type(self.name, value, type(self.default))
        elif isinstance(self.default, int):
            check_integer(self.name, value, min(1, self.default))
        elif isinstance(self.default, float):
            check_number(self.name, value, 0.0, 1.0)
        if isinstance(value, str) and self.choices and value not in self.choices and self.normalise is None:
            raise ConfigError(f"{self.name}: {value!r} is not one of {', '.join(map(str, self.choices))}")
        if self.required and not value:
            raise ConfigError(f"{self.name}: {config.method} needs {self.meaning}")
        if self.at_least and value < config.value(self.at_least):
            raise ConfigError(f"{self.name}: {value} is below {self.at_least}, {config.value(self.at_least)}")


def shared(name: str, **changes: Any) -> Field:
    """Return a field that several methods have, as one of them declares it: with its own range, first value or meaning."""
    return replace(_FIELDS[name], **changes)


@dataclass(frozen=True)
class Method:
    """The declaration of a method. Everything that a program lists by method is derived from it.

    ``benchmark`` has the values of the benchmark's row that differ from the first configuration; None leaves the method out.
    ``fields`` are those that a configuration of this method has, apart from ``method``. Those that are no attributes of
    :class:`SpeculativeConfig` are read by :meth:`SpeculativeConfig.value`.
    """

    name: str
    fields: tuple[Field, ...] = ()
    source: str = ""  # where its drafts come from, as a phrase for the documentation
    rank: int = 100  # its place among all methods, simplest first; decides ties between finalists, and the order of tables
    color: str = ""  # in charts, as ``#rrggbb``; empty for one that follows from the name
    short: str = ""  # its name in at most ten characters; empty for the name itself
    label: Callable[[SpeculativeConfig], str] = lambda config: ""  # what a configuration's label shows in parentheses
    check: Callable[[SpeculativeConfig], None] = lambda config: None  # raises ``ConfigError`` for an invalid combination
    lookup: bool = False  # whether drafts are copied from earlier text without running a model, at almost no cost
    trees_only: bool = False  # whether it drafts nothing but trees
    second: bool = True  # whether a cascade may put it after a prompt lookup
    paired: bool = False  # whether a study tries its first configuration after a prompt lookup at once
    also: tuple[Mapping[str, Any], ...] = ()  # further configurations that a study tries first, as values by field
    benchmark: Mapping[str, Any] | None = field(default_factory=dict)
    engine_method: str = ""  # the term of engines for this way of drafting; empty if they have none
    no_engine: str = "no engine knows it"  # why engines cannot draft in this way

    def __post_init__(self) -> None:
        names = [each.name for each in self.fields]
        for name in ("method", "options", *names):
            if names.count(name) > (name not in ("method", "options")):
                raise ValueError(f"{self.name}.{name}: is declared twice")
        if not self.name.isidentifier() or not all(map(str.isidentifier, names)):
            raise ValueError(f"{self.name}: it and its fields are not all names")
        for place, each in enumerate(self.fields):
            if each.name in _FIELDS and each.default != _FIELDS[each.name].default:
                raise ValueError(f"{self.name}.{each.name}: has another default than in other methods")
            if each.at_least and each.at_least not in names[:place]:
                raise ValueError(f"{self.name}.{each.name}: follows {each.at_least}")
        if not self.color:
            object.__setattr__(self, "color", f"#{hashlib.sha256(self.name.encode()).hexdigest()[:6]}")
        object.__setattr__(self, "short", (self.short or self.name)[:10])

    def __getitem__(self, name: str) -> Field:
        return next(each for each in self.fields if each.name == name)

    def __contains__(self, name: str) -> bool:
        return any(each.name == name for each in self.fields)

    @property
    def plan_field(self) -> str:
        """The name of the field that holds a draft plan (:mod:`layerskip.draft_plan`); empty if there is none."""
        return next((each.name for each in self.fields if each.normalise), "")

    @property
    def options(self) -> Mapping[str, Any]:
        """The defaults of the fields that only this method has."""
        return {each.name: each.default for each in self.fields if each.name not in _FIELDS}

    @property
    def known(self) -> tuple[str, ...]:
        """The names of all fields that a configuration of this method may set."""
        return ("method", *(each.name for each in self.fields))

    @property
    def first(self) -> dict[str, Any]:
        """The values of the first configuration of a study, without those that its user must name."""
        given = [each for each in self.fields if not each.required]
        return {each.name: each.default if each.first is None else each.first for each in given}

    @property
    def row(self) -> dict[str, Any]:
        """The plain values of the benchmark's row; ``???`` for a path that the user must name."""
        found = {each.name: "???" for each in self.fields if each.required} | self.first | dict(self.benchmark or {})
        for name, value in found.items():
            if isinstance(value, StopRule):
                found[name] = value.method if value.method == "length" else value.to_dict()
        return {name: value for name, value in found.items() if value != ()}


_METHODS: dict[str, Method] = {}


def declare(method: Method, again: bool = False) -> None:
    """Make a method known; ``again`` replaces an earlier declaration, as when a cell of a notebook runs twice."""
    if not again and _METHODS.get(method.name, method) is not method:
        raise ValueError(f"method: {method.name} is declared twice")
    _METHODS[method.name] = method


def methods() -> Mapping[str, Method]:
    """Return all known methods by name, in the order of their ranks, plain decoding (``none``) first."""
    return dict(sorted(_METHODS.items(), key=lambda item: (item[1].rank, item[0])))


PLAIN = Method(
    "none", source="nothing", rank=0, color="#666666", lookup=True, second=False, benchmark=None, engine_method="none"
)
"""Plain decoding, which a configuration has by default."""
declare(PLAIN)


def _usual(default: Any, meaning: str, **declared: Any) -> Any:
    """Return a field that several methods have, with its declaration where they do not change it."""
    return field(default=default, metadata={"meaning": meaning, **declared})


@dataclass(frozen=True)
class SpeculativeConfig:
    """One way to decode.

    Which of the fields a method reads, and what they mean there, its drafter declares. The others keep their defaults.
    ``verify_cost`` is as measured by :func:`~layerskip.costs.timing.time_verification`, ``draft_cost`` as measured by
    :func:`~layerskip.costs.timing.time_drafting`: per level of a tree, or of all levels if drafted in one pass; 0 for
    lookups.

    Raises:
        ConfigError: a value is out of range, or a field is set that ``method`` does not read.
    """

    method: str = "none"  # ``none`` (plain decoding) or a declared method, such as ``prompt_lookup``
    num_speculative_tokens: int = _usual(4, "the most tokens of a draft, or the greatest depth of a tree")
    mask: str = _usual("", "the skipped sub-layers", normalise=normalise_mask)  # in the text form of layerskip.draft_plan
    stop: StopRule = _usual(NEVER, "when a draft ends early", choices=("length", "threshold", "adaptive"))
    prompt_lookup_min: int = _usual(1, "the shortest n-gram to look up, in tokens")
    prompt_lookup_max: int = _usual(3, "the longest n-gram, which is tried first, in tokens", at_least="prompt_lookup_min")
    match: str = _usual("last", "which of several matches is copied from", choices=("last", "first"))
    draft_window: int = _usual(
        0, "the last tokens that a draft attends to, with the first four; 0 for all", choices=(0, 256, 512, 1024, 2048)
    )
    siblings: int = _usual(0, "other likely tokens beside each drafted one, verified with it as a tree; 0 drafts chains")
    datastore: str = _usual("", "the folder of a datastore", path=True)
    tree_tokens: int = _usual(8, "the most tokens of a tree")
    top_k: int = _usual(4, "successors that are kept of each token")
    guess_set_size: int = _usual(4, "n-grams that are kept and verified for each first token")
    window: int = _usual(5, "guesses in each row of the window")
    min_token_prob: float = _usual(0.05, "the least probability of a branch", log=True)
    head: str = _usual("", "the folder of a trained head", path=True, required=True)
    draft_model: str = _usual("", "a hub id, a folder or a .gguf file", path=True, required=True)
    members: tuple[SpeculativeConfig, ...] = _usual((), "at least two configurations that draft")
    verify_cost: Costs = _usual((), "the cost of verifying 1, 2, ... tokens, in steps of plain decoding")
    draft_cost: Costs = _usual((), "the cost of each member per drafted token or level, in steps of plain decoding")
    options: tuple[tuple[str, Any], ...] = ()  # the fields that only this method has, as pairs of name and value

    def __post_init__(self) -> None:
        method = _method(self.method)
        _refuse_foreign(self, (*method.known, "options"), f"method {self.method}")
        refuse_unknown(dict(self.options), tuple(method.options), f"method {self.method}")
        given = dict(method.options) | dict(self.options)  # so that two configurations that decode alike are equal
        object.__setattr__(self, "options", tuple((name, given[name]) for name in method.options))
        for each in method.fields:
            each.check(self)
            if each.normalise is not None:
                self._normalise(each.name, each.normalise)
        method.check(self)
        for each in method.fields:
            if not each.used(self) and self.value(each.name) != each.default:
                raise ConfigError(f"{each.name}: has no effect in this configuration of {self.method}")

    def _normalise(self, name: str, normalise: Callable[[str], str]) -> None:
        try:
            text = normalise(self.value(name))
        except PlanError as error:
            raise ConfigError(f"{name}: {error}") from None
        own = tuple((other, text if other == name else value) for other, value in self.options)
        object.__setattr__(self, *((name, text) if name in _FIELDS else ("options", own)))

    @classmethod
    def of(cls, method: str, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Return a configuration of a method with values by field, those of its own fields included."""
        own = tuple((name, values[name]) for name in _method(method).options if name in values)
        return cls(method, **{name: value for name, value in values.items() if name in _FIELDS}, options=own)

    def value(self, name: str) -> Any:
        """Return the value of a field of the method."""
        return getattr(self, name) if name in _FIELDS else dict(self.options)[name]

    @property
    def plan(self) -> str:
        """The text of its draft plan; empty if the method has none."""
        name = _method(self.method).plan_field
        return str(self.value(name)) if name else ""

    def plans(self, layers: int) -> list[DraftPlan]:
        """Return its draft plan, or those of its members, for a model of so many layers."""
        return [DraftPlan.parse(part.plan, layers) for part in self.members or (self,)]

    @property
    def values(self) -> dict[str, Any]:
        """The values of all fields of the method, by name."""
        return {each.name: self.value(each.name) for each in _method(self.method).fields}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that have an effect as plain values, from which ``from_dict`` makes an equal configuration."""
        fields: dict[str, Any] = {"method": self.method}
        for each in _method(self.method).fields:
            value = self.value(each.name)
            if each.used(self) and value != ():
                fields[each.name] = _plain(value)
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SpeculativeConfig:
        """Build from plain values; a key that ``method`` does not know is refused by name.

        Earlier versions had a rule ``accept``. Files in which it was ``exact`` mean the same without it.
        """
        if not isinstance(fields, Mapping):
            raise ConfigError(f"config: {fields!r} is not a table of fields")
        values = dict(fields)
        if (accept := values.pop("accept", "exact")) not in ("exact", {"method": "exact"}):
            raise ConfigError(f"accept: {accept!r} changes the output, which is no longer supported")
        method = _method(values.get("method", "none"))
        refuse_unknown(values, method.known, f"method {method.name}")
        if "stop" in values:
            values["stop"] = StopRule.from_dict(values["stop"])
        lists = [name for name, value in values.items() if isinstance(value, Sequence) and not isinstance(value, str)]
        values |= {name: tuple(values[name]) for name in lists}
        if isinstance(values.get("members"), tuple):  # anything else is refused as the value of a field
            values["members"] = tuple(_member(index, member) for index, member in enumerate(values["members"]))
        return cls.of(method.name, values)

    def label(self) -> str:
        """Return a short name for tables and logs."""
        if self.method == "none":
            return "no drafting"
        detail = _method(self.method).label(self)
        if self.members:
            return f"{self.method}: {detail}"
        stop = "" if self.stop.method == "length" else f", {self.stop.method} {self.stop.threshold:g}"
        length = f"length {self.num_speculative_tokens}{stop}" if "num_speculative_tokens" in _method(self.method) else ""
        shown = "; ".join(filter(None, (detail, length)))
        return self.method.replace("_", " ") + (f" ({shown})" if shown else "")


_FIELDS = {
    each.name: Field(each.name, each.default, **each.metadata)
    for each in dataclasses.fields(SpeculativeConfig)
    if each.metadata
}
"""The fields that several methods have."""


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.to_dict() if isinstance(value, (StopRule, SpeculativeConfig)) else value


def _method(name: Any) -> Method:
    if not isinstance(name, str) or name not in _METHODS:
        raise ConfigError(f"method: {name!r} is not one of {', '.join(methods())}")
    return _METHODS[name]


def _member(index: int, fields: Any) -> SpeculativeConfig:
    try:
        return SpeculativeConfig.from_dict(fields)
    except ConfigError as error:
        raise ConfigError(f"members.{index}.{error}") from None
