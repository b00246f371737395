"""Stop rules, acceptance rules and costs of a configuration, and checks of its values. Does not import torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # the last are bytes that are not UTF-8


class ConfigError(ValueError):
    """An invalid configuration. The message begins with the field."""


def refuse_unknown(fields: Mapping[str, Any], known: tuple[str, ...], owner: str, prefix: str = "") -> None:
    """Raise ``ConfigError`` for a field that is not known.

    Args:
        fields: plain values by field.
        known: the names of the known fields.
        owner: the fields' owner, for the message.
        prefix: put before the field in the message.
    """
    for name in fields:
        if name not in known:
            raise ConfigError(f"{prefix}{name}: not a field of {owner}; it has {', '.join(known)}")


def refuse_foreign(value: Any, known: tuple[str, ...], owner: str, prefix: str = "") -> None:
    """Raise ``ConfigError`` for a field of a dataclass that is set although its kind does not read it.

    Args:
        value: the dataclass.
        known: the names of the fields that its kind reads.
        owner: the fields' owner, for the message.
        prefix: put before the field in the message.
    """
    for field in dataclasses.fields(value):
        if field.name not in known and getattr(value, field.name) != field.default:
            raise ConfigError(f"{prefix}{field.name}: does not belong to {owner}")


def check_type(name: str, value: Any, expected: type) -> None:
    """Raise ``ConfigError`` for a value of another type."""
    if not isinstance(value, expected):
        raise ConfigError(f"{name}: {value!r} is not a {expected.__name__}")


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise ``ConfigError`` for a value that is not an integer from ``least`` to ``most``.

    Args:
        name: the field, for the message.
        value: the value to check.
        least: the smallest valid value.
        most: the largest valid value; None for no limit.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: {value!r} is not a whole number of at least {least}")
    if most is not None and value > most:
        raise ConfigError(f"{name}: {value} is more than {most}")


def check_text(name: str, value: str) -> None:
    """Raise ``ConfigError`` for a name or path with characters that a terminal obeys or a file cannot hold."""
    if _CONTROLS.search(value):
        raise ConfigError(f"{name}: {value!r} has characters that cannot be printed")


def check_number(name: str, value: Any, least: float, most: float) -> None:
    """Raise ``ConfigError`` for a value that is not a number from ``least`` to ``most``.

    Args:
        name: the field, for the message.
        value: the value to check.
        least: the smallest valid value.
        most: the largest valid value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ConfigError(f"{name}: {value!r} is not a number from {least:g} to {most:g}")


Costs = tuple[float, ...] | tuple[tuple[int, tuple[float, ...]], ...]
"""Costs in steps of plain decoding; or the costs at several contexts (tokens before the step), as pairs in rising order."""


def contexts_of(costs: Costs) -> list[int]:
    """Return the contexts of costs; empty for those of one context, which they do not state."""
    return [entry[0] for entry in costs if isinstance(entry, tuple)]


def tables_of(costs: Costs) -> list[tuple[float, ...]]:
    """Return the costs at every context."""
    return [entry[1] for entry in costs if isinstance(entry, tuple)] or [costs]  # type: ignore[list-item]


def costs_at(costs: Costs, context: int) -> tuple[float, ...]:
    """Return the costs at a context: interpolated between the nearest ones, or those of the nearest outside their range."""
    pairs = list(zip(contexts_of(costs), tables_of(costs), strict=False))
    if not pairs:
        return tables_of(costs)[0]
    low = max((pair for pair in pairs if pair[0] <= context), default=pairs[0])
    high = min((pair for pair in pairs if pair[0] >= context), default=pairs[-1])
    share = (context - low[0]) / max(1, high[0] - low[0])
    return tuple(one + share * (other - one) for one, other in zip(low[1], high[1], strict=True))


def check_costs(name: str, costs: Any, least: float) -> None:
    """Raise ``ConfigError`` for a value that is not :data:`Costs` of at least ``least``."""
    if not isinstance(costs, tuple):
        raise ConfigError(f"{name}: {costs!r} is not a list of numbers")
    pairs = [entry for entry in costs if isinstance(entry, tuple)]
    if pairs:
        if len(pairs) < len(costs) or any(len(pair) != 2 or not isinstance(pair[1], tuple) for pair in pairs):
            raise ConfigError(f"{name}: {costs!r} is neither a list of numbers nor one of pairs of a context and numbers")
        for context, _ in pairs:
            check_integer(name, context, 0)
        contexts, sizes = [pair[0] for pair in pairs], {len(pair[1]) for pair in pairs}
        if contexts != sorted(set(contexts)) or len(sizes) > 1 or 0 in sizes:
            raise ConfigError(f"{name}: contexts must rise, and have as many numbers each")
    for table in tables_of(costs):
        for cost in table:
            check_number(name, cost, least, 1e6)


def as_tuples(value: Any) -> Any:
    """Return a value with tuples in place of lists, as configurations hold them."""
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value


def as_lists(value: Any) -> Any:
    """Return a value with lists in place of tuples, as JSON holds them."""
    return list(map(as_lists, value)) if isinstance(value, (list, tuple)) else value


class _Rule:
    """A kind of rule with its parameters, which are numbers in [0, 1] or booleans."""

    kind: str

    _NAME: ClassVar[str]
    _FIELDS: ClassVar[dict[str, tuple[str, ...]]]

    def __post_init__(self) -> None:
        self._check_kind(self.kind)
        refuse_foreign(self, ("kind", *self._FIELDS[self.kind]), f"{self._NAME} rule {self.kind}", f"{self._NAME}.")
        for name in self._FIELDS[self.kind]:
            value = getattr(self, name)
            if isinstance(getattr(type(self), name), bool):
                check_type(f"{self._NAME}.{name}", value, bool)
            else:
                check_number(f"{self._NAME}.{name}", value, 0.0, 1.0)

    @classmethod
    def _check_kind(cls, kind: Any) -> None:
        if not isinstance(kind, str) or kind not in cls._FIELDS:
            raise ConfigError(f"{cls._NAME}.kind: {kind!r} is not one of {', '.join(cls._FIELDS)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that this kind of rule reads, as plain values."""
        return {"kind": self.kind} | {name: getattr(self, name) for name in self._FIELDS[self.kind]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any] | str) -> Self:
        """Build from plain values or from the name of a kind alone.

        Raises:
            ConfigError: an unknown kind, a field that the kind does not read, or a value out of range.
        """
        if isinstance(fields, str):
            fields = {"kind": fields}
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{cls._NAME}: {fields!r} is neither the name of a rule nor a table of its fields")
        kind = fields.get("kind", cls.kind)
        cls._check_kind(kind)
        refuse_unknown(fields, ("kind", *cls._FIELDS[kind]), f"{cls._NAME} rule {kind}", f"{cls._NAME}.")
        return cls(**fields)


@dataclass(frozen=True)
class StopRule(_Rule):
    """The condition under which a drafter stops before ``draft_length``.

    ``length``: never. ``threshold``: after a drafted token whose confidence (the draft's probability of its most likely
    token) is below ``threshold``. ``adaptive``: as ``threshold``, with a threshold that follows the acceptance rate as in
    Draft & Verify (arXiv 2309.08168), section 3.3. After every round ``rate = acceptance_decay * rate +
    (1 - acceptance_decay) * accepted / drafted``. The threshold moves up by ``step`` if the rate is at most
    ``target_acceptance``, else down, smoothed by ``threshold_decay``.

    Args:
        kind: ``length``, ``threshold`` or ``adaptive``.
        threshold: confidence in [0, 1]; for ``adaptive`` the initial one.
        target_acceptance: the acceptance rate that ``adaptive`` aims at, in [0, 1].
        step: how far ``adaptive`` moves the threshold per round, in [0, 1].
        acceptance_decay: weight of the past in the acceptance rate, in [0, 1].
        threshold_decay: weight of the past in the threshold, in [0, 1].
        carry: whether ``adaptive`` keeps its threshold from prompt to prompt until the drafter is reset; otherwise each
            prompt starts with ``threshold``.
    """

    kind: str = "length"
    threshold: float = 0.6
    target_acceptance: float = 0.9
    step: float = 0.01
    acceptance_decay: float = 0.5
    threshold_decay: float = 0.9
    carry: bool = True

    _NAME: ClassVar[str] = "stop"
    _FIELDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "length": (),
        "threshold": ("threshold",),
        "adaptive": ("threshold", "target_acceptance", "step", "acceptance_decay", "threshold_decay", "carry"),
    }


NEVER = StopRule()
"""The stop rule without early stopping."""


@dataclass(frozen=True)
class AcceptRule(_Rule):
    """The condition under which a drafted token is accepted.

    ``exact``: speculative sampling, whose output follows the target's own distribution. The other rules exist for comparison
    and change the output. ``threshold``: accept a token whose probability under the target is at least ``threshold``.
    ``typical``: accept a token with at least ``min(epsilon, delta * exp(-entropy))``, as in Medusa (arXiv 2401.10774),
    section 2.3.1.

    Args:
        kind: ``exact``, ``threshold`` or ``typical``.
        threshold: in [0, 1].
        epsilon: in [0, 1].
        delta: in [0, 1].
    """

    kind: str = "exact"
    threshold: float = 0.3
    epsilon: float = 0.09
    delta: float = 0.3

    _NAME: ClassVar[str] = "accept"
    _FIELDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "exact": (),
        "threshold": ("threshold",),
        "typical": ("epsilon", "delta"),
    }

    @property
    def lossless(self) -> bool:
        """True if the output follows the target's own distribution."""
        return self.kind == "exact"


EXACT = AcceptRule()
"""The lossless acceptance rule."""
