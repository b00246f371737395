"""The search space of a study: from a trial's choices to a configuration, and back.

The space is conditional: a trial chooses a method first, then the fields of that method, within the ranges that its
drafter declares. The members of a cascade are chosen otherwise, and so are masks: one ``suggest_int`` of 0 or 1 per
sub-layer outside the protected first and last layers, because Optuna's TPE does not learn from the same bits as categorical
parameters.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import optuna

from layerskip import DraftPlan, PlanError, SpeculativeConfig, StopRule
from layerskip.config import Costs, Field, Method, methods
from layerskip.draft_plan import BITS, KEEP, NAMES, SKIP
from searches.app.checks import InputError, check_list, check_number, check_whole, read_bytes

T = TypeVar("T")
Params = dict[str, int | float | str]
_ACCEPTED = 0.8  # share of drafted tokens, while nothing is measured


def check_values(name: str, field: Field, values: Any) -> None:
    """Check the values that a user gives a field: two ends of a range, or a list of choices."""
    if field.range is None:
        known = tuple(value for value in field.choices if isinstance(value, str) and not field.normalise)
        check_list(name, values, known or None, or_empty=field.path)
        for value in values if isinstance(field.default, int) else ():
            check_whole(name, value, min(1, field.default))
        return
    pair = isinstance(values, Sequence) and not isinstance(values, str) and len(values) == 2
    if not pair or not all(isinstance(end, (int, float)) for end in values) or values[0] > values[1]:
        raise InputError(f"{name}: {values!r} is not a range, such as [{field.range[0]:g},{field.range[1]:g}]")
    for end in values:
        if isinstance(field.default, float):
            check_number(name, end, maximum=1, or_zero=not field.log)
        else:
            check_whole(name, end)


def suggest_value(trial: optuna.trial.BaseTrial, name: str, field: Field, values: Sequence[Any]) -> Any:
    """Return the value that a trial chooses for a parameter, among the choices or between the two ends of a range."""
    if field.range is None:
        value = values[0] if len(values) == 1 else trial.suggest_categorical(name, tuple(values))
        if not isinstance(field.default, StopRule):
            return value
        if value == "length":
            return StopRule()
        # Optuna's steps add up to 0.7000000000000001, which would be another rule than the 0.7 of scans.
        return StopRule(str(value), round(trial.suggest_float(f"{name}.threshold", 0.1, 0.9, step=0.05), 9))
    low, high = values
    if low == high:
        return low
    if isinstance(field.default, float):
        return trial.suggest_float(name, low, high, log=field.log)
    return trial.suggest_int(name, low, high, log=field.log)


def check_masks(space: SearchSpace) -> None:
    check_whole("space.protect_first", space.protect_first, 0)
    check_whole("space.protect_last", space.protect_last, 0)
    check_list("space.masks", space.masks)
    plans = [("space.ranges.quantized.weights", text) for text in space.values("quantized", "weights")]
    for name, mask in [*plans, *(("space.masks", mask) for mask in space.masks)]:
        parsed = _read_plan(lambda text: DraftPlan.parse(text, space.layers), mask, name)
        outside = [i for i in range(space.layers) if (parsed.attention[i] or parsed.mlp[i]) and i not in space.skippable]
        if outside:
            raise InputError(f"{name}: {mask!r} skips layer {outside[0]}, which is protected")


def _read_plan(read: Callable[[str], T], text: object, name: str) -> T:
    """Return what a function reads from the text of a plan; an :class:`InputError` names the field."""
    try:
        return read(str(text))
    except PlanError as error:
        raise InputError(f"{name}: {text!r}: {error}") from None


def structured_masks(space: SearchSpace) -> Iterable[str]:
    """Yield early single skips, early contiguous runs, and masks of every third or fourth sub-layer."""
    bits, count = space.skippable, len(space.skippable)
    early = bits[count // 6]
    yield f"attention:{early}"
    yield f"mlp:{bits[count // 4]}"
    for length in sorted({max(1, round(space.layers * share)) for share in (0.1, 0.25, 0.4)}):
        yield f"layers:{early}-{min(early + length, bits[-1] + 1) - 1}"
    yield "attention:" + ",".join(map(str, bits[1::3] or bits[:1]))
    yield "layers:" + ",".join(map(str, bits[2::4] or bits[:1]))


DraftCost = Callable[[Sequence[SpeculativeConfig]], Costs]
"""The cost of one drafted token of each member of a cascade, in steps of plain decoding; empty if unknown."""
CopiesBytes = Callable[[Sequence[DraftPlan]], Mapping[str, int]]
"""The bytes, by format, of the copies of weights that drafts by some plans read."""
LOOKUP = "prompt_lookup"
"""The first member of a cascade."""

_CASCADE = "cascade"
_LONG_CONTEXT = 2048  # tokens from which attention to fewer of them saves a draft much time
_RUNTIME = {"runtime": True}  # measured or made by the program, not configured


def searched_fields(method: Method) -> list[Field]:
    """Return the fields of a method that a study chooses within their declared ranges, choices or paths."""
    return [each for each in method.fields if each.range or each.choices or each.path]


@dataclass(frozen=True)
class SearchSpace:
    """The configurations that a study may propose for one target.

    Args:
        layers: the number of decoder layers of the target.
        methods: the drafters to choose from; None for all. ``none`` is always among them.
        protect_first: the number of first layers that are never skipped.
        protect_last: the number of last layers that are never skipped.
        ranges: what a study chooses a field from, by method and field, in place of its declared range or choices. Methods
            that need a head, a draft model or a datastore are left out where none is named.
        masks: further masks to try first, in text form.
        memory: bytes, or a text such as 2GiB, that the copies of weights of one draft may take; null: without a limit.
        trees: whether the target can verify trees.
        plans: whether a trial may choose the bits of every sub-layer.
        copies_bytes: the bytes of the copies that drafts by some plans read; None if nothing limits them.
        verify_cost: the cost of verification in cascades; empty if it was not measured.
        draft_cost: the cost of drafting by members of cascades; None if it is not measured.
    """

    layers: int = field(metadata=_RUNTIME)
    methods: Sequence[str] | None = None
    protect_first: int = 2
    protect_last: int = 2
    ranges: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    masks: Sequence[str] = ()
    memory: int | str | None = None
    trees: bool = field(default=True, metadata=_RUNTIME)
    plans: bool = field(default=False, metadata=_RUNTIME)
    copies_bytes: CopiesBytes | None = field(default=None, repr=False, compare=False, metadata=_RUNTIME)
    verify_cost: Costs = field(default=(), metadata=_RUNTIME)
    draft_cost: DraftCost | None = field(default=None, repr=False, compare=False, metadata=_RUNTIME)

    def __post_init__(self) -> None:
        known = methods()
        if self.methods is not None:
            check_list("space.methods", self.methods, tuple(known))
        if self.methods is not None and _CASCADE in self.methods and set(self.methods) <= {"none", _CASCADE}:
            raise InputError("space.methods: a cascade is prompt_lookup and another method, and those are missing")
        ranges: dict[str, dict[str, tuple[Any, ...]]] = {}
        for method, fields in (self.ranges or {}).items():
            check_list("space.ranges", [method], tuple(known))
            if not isinstance(fields, Mapping):
                raise InputError(f"space.ranges.{method}: {fields!r} is not a table of fields")
            searched = {each.name: each for each in searched_fields(known[method])}
            for name, values in fields.items():
                check_list(f"space.ranges.{method}", [name], tuple(searched))
                check_values(f"space.ranges.{method}.{name}", searched[name], values)
                if (normalise := searched[name].normalise) is not None:
                    values = [_read_plan(normalise, value, f"space.ranges.{method}.{name}") for value in values]
                ranges.setdefault(method, {})[name] = tuple(values)
        object.__setattr__(self, "ranges", ranges)
        for method in ranges:
            for each in known[method].fields:
                if each.at_least and self.values(method, each.name)[1] < self.values(method, each.at_least)[0]:
                    raise InputError(f"space.ranges.{method}.{each.name}: ends below {each.at_least}, which is not above it")
        if self.memory is not None:
            object.__setattr__(self, "memory", read_bytes("space.memory", self.memory))
        check_masks(self)
        if not self.skippable and any("mask" in known[method] for method in self.available_methods):
            raise InputError(f"space.protect_first, space.protect_last: leave none of {self.layers} layers to skip")

    @property
    def skippable(self) -> tuple[int, ...]:
        return tuple(range(self.protect_first, self.layers - self.protect_last))

    @property
    def scanned(self) -> tuple[str, ...]:
        """The methods whose drafts scans replay: those that follow a plan and may attend to the whole context."""
        planned = [name for name in self.available_methods if methods()[name].plan_field]
        return tuple(name for name in planned if 0 in self.values(name, "draft_window"))

    @property
    def treatments(self) -> tuple[str, ...]:
        """What may become of a sub-layer in a plan: skipped, or read in a format, those of fewer bits first."""
        return SKIP, *self.formats, KEEP

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of fewer bits, the smallest first."""
        plans = [DraftPlan.parse(text, self.layers) for text in self.values("quantized", "weights")]
        return tuple(NAMES[bits] for bits in sorted(set[int]().union(*(plan.formats for plan in plans))))

    @property
    def available_methods(self) -> tuple[str, ...]:
        """The methods that a trial chooses from: those of ``methods``, without those that lack a head, a model or trees."""
        found = [
            method
            for method in methods().values()
            if (self.methods is None or method.name in ("none", *self.methods))
            and (self.trees or not method.trees_only)
            and all(self.values(method.name, each.name) for each in method.fields if each.required)
        ]
        cascades = any(method.name == LOOKUP for method in found) and any(method.second for method in found)
        return tuple(method.name for method in found if method.name != _CASCADE or cascades)

    @property
    def second_methods(self) -> tuple[str, ...]:
        return tuple(method for method in self.available_methods if methods()[method].second)

    def values(self, method: str, name: str) -> tuple[Any, ...]:
        """Return what a field is chosen from: the lowest and highest value of a number, or all choices."""
        declared = methods()[method]
        return self._values(declared, declared[name])

    def _values(self, method: Method, field: Field) -> tuple[Any, ...]:
        if field.name == "top_k" and not self.trees:
            return 1, 1  # chains
        given = self.ranges.get(method.name, {}).get(field.name)
        if field.path:
            return (*(() if field.required else ("",)), *map(str, given or ()))
        found = tuple(given) if given is not None else field.range or field.choices
        for other in method.fields:
            if other.at_least == field.name:
                found = found[0], min(found[1], self._values(method, other)[1])
        return found

    def narrowed(self, methods_of: Collection[str] | None = None, **values: Sequence[Any]) -> SearchSpace:
        """Return the space with other ranges or choices of some fields, of some methods or of all that have them."""
        ranges = {method: dict(fields) for method, fields in self.ranges.items()}
        for method in methods().values():
            for each in searched_fields(method) if methods_of is None or method.name in methods_of else ():
                if each.name in values:
                    ranges.setdefault(method.name, {})[each.name] = values[each.name]
        return replace(self, ranges=ranges)

    def at_context(self, tokens: int) -> SearchSpace:
        """Return the space for a number of tokens in the cache: without windows if few, as far as its user chose none."""
        unset = [name for name in methods() if "draft_window" not in self.ranges.get(name, {})]
        return self if tokens >= _LONG_CONTEXT else self.narrowed(unset, draft_window=(0,))

    def suggest(self, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
        members = self._suggest(trial)
        return self._cascade(*members) if len(members) > 1 else members[0]

    def params(self, config: SpeculativeConfig) -> Params:
        """Return the choices that lead to a configuration; the reverse of :meth:`suggest`."""
        choices: Params = {"method": config.method}
        if config.members:
            choices["cascade.second"] = config.members[1].method
        for member in config.members or (config,):
            mask = DraftPlan.parse(member.mask, self.layers)
            for layer in self.skippable:
                choices |= {f"attention_{layer}": int(mask.attention[layer]), f"mlp_{layer}": int(mask.mlp[layer])}
            for name, value in member.values.items():
                if isinstance(value, StopRule):
                    choices[f"{member.method}.{name}.threshold"], value = value.threshold, value.method
                choices[f"{member.method}.{name}"] = value
            choices |= self._plan_params(member)
        trial = optuna.trial.FixedTrial(choices)
        self._suggest(trial)
        found: Params = trial.params  # without what was not asked for
        return found

    def _suggest(self, trial: optuna.trial.BaseTrial) -> list[SpeculativeConfig]:
        chosen = [str(trial.suggest_categorical("method", self.available_methods))]
        if chosen == [_CASCADE]:
            chosen = [LOOKUP, str(trial.suggest_categorical("cascade.second", self.second_methods))]
        known = methods()
        return [self._suggest_fields(known[method], trial) for method in chosen]

    def _suggest_fields(self, method: Method, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
        known = {}
        if "mask" in method:
            attention = {i for i in self.skippable if trial.suggest_int(f"attention_{i}", 0, 1)}
            mlp = {i for i in self.skippable if trial.suggest_int(f"mlp_{i}", 0, 1)}
            known["mask"] = DraftPlan.of(self.layers, attention, mlp).format()

        def choose(each: Field, span: Sequence[Any]) -> Any:
            value = suggest_value(trial, f"{method.name}.{each.name}", each, span)
            if each.name != "weights" or not self.plans or not trial.suggest_int("quantized.mixed", 0, 1):
                return value
            plan = self._suggest_plan(trial)
            return plan.format() if plan.formats else value

        return self._fill(method, known, choose)

    def _suggest_plan(self, trial: optuna.trial.BaseTrial) -> DraftPlan:
        names, last = self.treatments, len(self.treatments) - 1
        plan = DraftPlan.uniform(self.layers, BITS[names[trial.suggest_int("read_head", 1, last)]])
        for kind, layer in itertools.product(("attention", "mlp"), range(self.layers)):
            chosen = trial.suggest_int(f"read_{kind}_{layer}", 0 if layer in self.skippable else 1, last)
            plan = plan.changed(kind, layer, names[chosen])
        return plan

    def _plan_params(self, config: SpeculativeConfig) -> Params:
        """Return the choices that lead to the weights of a configuration; none if it has no plan of fewer bits."""
        if config.method != "quantized":
            return {}
        weights, names, usual = config.value("weights"), self.treatments, self.values("quantized", "weights")
        plan, is_mixed = DraftPlan.parse(weights, self.layers), weights not in usual
        found: Params = {"quantized.mixed": int(is_mixed), "quantized.weights": usual[0] if is_mixed else weights}
        for kind, layer in itertools.product(("attention", "mlp"), range(self.layers)):
            found[f"read_{kind}_{layer}"] = names.index(plan.treatment(kind, layer))
        return found | {"read_head": names.index(NAMES[plan.head_bits])}

    def over_memory(self, plans: Sequence[DraftPlan]) -> str:
        """Return why the copies of weights that drafts by some plans read do not fit; empty if they do."""
        if self.copies_bytes is None or self.memory is None:
            return ""
        size = sum(self.copies_bytes(plans).values())
        fits = size <= int(self.memory)
        return "" if fits else f"copies of weights take {size:,} bytes, and space.memory is {self.memory:,}"

    def allows(self, config: SpeculativeConfig) -> bool:
        if self.over_memory(config.plans(self.layers)):
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # what Optuna has for a value out of range
            try:
                return self.suggest(optuna.trial.FixedTrial(self.params(config))) == config
            except (ValueError, UserWarning):
                return False

    def nearest(self, method: str, wanted: Mapping[str, Any]) -> SpeculativeConfig:
        """Return the configuration of a method with the wanted values, or the nearest ones of the space."""
        known = {"mask": wanted["mask"]} if "mask" in wanted else {}

        def choose(each: Field, span: Sequence[Any]) -> Any:
            value = wanted.get(each.name, each.default)
            if each.range is not None:
                return min(max(value, span[0]), span[1])
            if isinstance(value, StopRule):
                return value if value.method in span else StopRule(span[0])
            return value if value in span or not span else span[0]

        return self._fill(methods()[method], known, choose)

    def _fill(
        self, method: Method, values: dict[str, Any], choose: Callable[[Field, Sequence[Any]], Any]
    ) -> SpeculativeConfig:
        """Return a configuration of known and of chosen values; fields that depend on others come last."""
        for each in sorted(searched_fields(method), key=lambda each: each.used is not Field.used):
            if each.used is Field.used or each.used(SpeculativeConfig.of(method.name, values)):
                value = choose(each, self._values(method, each))
                values[each.name] = max(value, values[each.at_least]) if each.at_least else value
        return SpeculativeConfig.of(method.name, values)

    def starts(self, method: str) -> list[SpeculativeConfig]:
        """Return the configurations of a method to try first, with each head, model or datastore.

        Self-drafts and cascades have none. Drafts are shorter than declared where verifying more tokens costs too much.
        """
        declared = methods()[method]
        if method in ("none", _CASCADE) or "mask" in declared:
            return []
        paths = [each.name for each in searched_fields(declared) if each.path]
        named = [dict(zip(paths, one, strict=True)) for one in itertools.product(*(self.values(method, p) for p in paths))]
        wanted = [declared.first | dict(more) | one for more in ({}, *declared.also) for one in named]
        found = dict.fromkeys(self.nearest(method, self._affordable(declared, each)) for each in wanted)
        return [config for config in found if not self.over_memory(config.plans(self.layers))]

    def _affordable(self, method: Method, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return values with drafts of at most the length that gives the most tokens per time at the usual acceptance."""
        costs = self.verify_cost
        if not costs:
            return dict(wanted)
        best = max(range(len(costs)), key=lambda drafted: (1 - _ACCEPTED ** (drafted + 2)) / costs[drafted]) + 1
        names = [name for name in ("num_speculative_tokens", "tree_tokens") if name in method]
        lengths = {name: wanted.get(name, method[name].default) for name in names}
        # Beyond the measured lengths, costs grow on; where they hardly grow at all, the declared length is as good.
        return dict(wanted) | ({name: min(best, length) for name, length in lengths.items()} if best < len(costs) else {})

    def after_lookup(self, seconds: Sequence[SpeculativeConfig]) -> list[SpeculativeConfig]:
        """Return the first of some configurations after a lookup; an empty list if the study has no cascades."""
        if _CASCADE not in self.available_methods:
            return []
        lookup = self.nearest(LOOKUP, self._affordable(methods()[LOOKUP], methods()[_CASCADE].row["members"][0]))
        return [self._cascade(lookup, second) for second in seconds[:1]]

    def lookups(self) -> list[SpeculativeConfig]:
        if LOOKUP not in self.available_methods:
            return []
        every: dict[str, Sequence[Any]] = {}
        for each in searched_fields(methods()[LOOKUP]):
            values = self.values(LOOKUP, each.name)
            every[each.name] = range(values[0], values[1] + 1) if each.range else values
        found = [dict(zip(every, chosen, strict=True)) for chosen in itertools.product(*every.values())]
        return [SpeculativeConfig.of(LOOKUP, one) for one in found if one["prompt_lookup_min"] <= one["prompt_lookup_max"]]

    def _cascade(self, *members: SpeculativeConfig) -> SpeculativeConfig:
        costs = () if self.draft_cost is None else self.draft_cost(members)
        return SpeculativeConfig(_CASCADE, members=members, verify_cost=self.verify_cost, draft_cost=costs)
