"""Which configurations may a study propose? A trial's choices to a configuration, and back for enqueueing.

The space is conditional: first the kind of drafter, then that kind's own parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import optuna

from layerskip import AcceptRule, MaskError, SkipMask, SpeculativeConfig

from .application import InputError, check_flag, check_list, check_whole
from .head_drafts import head_params, suggest_head
from .lookup_drafts import lookup_params, suggest_lookup
from .makeup import BRIDGES
from .pricing import DraftCost
from .shelf import Shelf
from .skipping import LEAST_PROBABILITY, skip_params, stop_params, suggest_skip, suggest_stop

KINDS = (
    *("none", "layer_skip", "prompt_lookup", "retrieval", "token_recycling", "lookahead"),
    *("eagle", "medusa", "draft_model", "cross_tokenizer", "cascade"),
)
TREES = ("retrieval", "token_recycling", "lookahead", "medusa")  # kinds that draft nothing else
STOPS = ("length", "threshold", "adaptive")
Range = tuple[int, int]
_RANGES = (
    *("skip_length", "lookup_length", "ngram", "tree_length", "tree_tokens"),
    *("candidates", "lookahead_length", "window", "model_length"),
)
_MODEL_PREFIXES = {"draft_model": "", "cross_tokenizer": "cross_"}
_NEVER_SECOND = ("none", "prompt_lookup", "cascade")
_KNOWN = {"kinds": KINDS, "stops": STOPS, "bridges": BRIDGES}
_LISTS = (
    *(*_KNOWN, "ranks", "widths", "draft_heads", "datastores"),
    *("eagle_heads", "medusa_heads", "drafts", "cross_drafts", "masks"),
)


@dataclass(frozen=True)
class SearchSpace:
    """The choices of a study, for one target.

    Args:
        layers: how many decoder layers the target has.
        kinds: the drafters to choose from; ``none`` is always among them.
        protect_first: so many first layers are never skipped.
        protect_last: so many last layers are never skipped.
        skip_length: shortest and longest draft of ``layer_skip``.
        siblings: the most other tokens that ``layer_skip`` may verify beside each drafted one; 0 searches chains alone.
        bridges: what may stand in for skipped sub-layers: ``none``, ``mean``, ``linear``, ``mlp``.
        ranks: of the maps of ``linear`` and ``mlp`` bridges; 0 is a full map.
        widths: of the MLPs of ``mlp`` bridges.
        draft_heads: sizes of the vocabulary that self-drafts and draft models have; 0 is all of it.
        stops: the stop rules of ``layer_skip``, ``eagle``, ``draft_model`` and ``cross_tokenizer``.
        lookup_length: shortest and longest draft of ``prompt_lookup``; least and greatest depth of ``retrieval``'s trees.
        ngram: shortest and longest n-gram of ``prompt_lookup`` and ``retrieval``.
        tree_length: least and greatest depth of the trees of ``token_recycling``.
        tree_tokens: fewest and most tokens that a tree may have, of recycled, retrieved or heads' tokens.
        datastores: those that ``retrieval`` chooses from, beside having none.
        candidates: fewest and most successors, or n-grams, kept of a token.
        lookahead_length: shortest and longest draft of ``lookahead``.
        window: fewest and most guesses in each row of its window.
        eagle_heads: folders of trained heads to choose from; without any, ``eagle`` is left out.
        medusa_heads: the same for ``medusa``.
        drafts: the draft models to choose from; without any, ``draft_model`` is left out.
        cross_drafts: those of another tokenizer; without any, ``cross_tokenizer`` is left out.
        model_length: shortest and longest draft of both, and of heads.
        masks: further masks to try first, in text form.
        allow_lossy: whether rules of acceptance that change the output are searched, too, and may win.
        trees: whether the target can verify them; else what drafts nothing else is left out, and ``eagle`` drafts chains.
        verify_cost: what verifying drafts costs, for cascades to verify as much as pays; empty where nobody measured it.
        draft_cost: what the members of a cascade take to draft; None where nobody measures it.
        shelf: where bridges and draft heads come from; without it there are none.

    Raises:
        InputError: a field is out of range.
    """

    layers: int
    kinds: Sequence[str] = KINDS
    protect_first: int = 2
    protect_last: int = 2
    skip_length: Range = (1, 8)
    siblings: int = 2
    bridges: Sequence[str] = ("none",)
    ranks: Sequence[int] = (0,)
    widths: Sequence[int] = (512,)
    draft_heads: Sequence[int] = (0,)
    stops: Sequence[str] = STOPS
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
    allow_lossy: bool = False
    trees: bool = True
    verify_cost: tuple[float, ...] = ()
    draft_cost: DraftCost | None = field(default=None, repr=False, compare=False)
    shelf: Shelf | None = field(default=None, repr=False, compare=False)
    _bits: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in _LISTS:
            check_list(f"space.{name}", getattr(self, name), _KNOWN.get(name))
        if set(self.kinds) <= {"none", "cascade"} and "cascade" in self.kinds:
            raise InputError("space.kinds: a cascade is prompt_lookup and another kind, and those are missing")
        for name in ("stops", "bridges", "ranks", "widths", "draft_heads"):
            if not getattr(self, name):
                raise InputError(f"space.{name}: is empty")
        for name, least in (("ranks", 0), ("widths", 1), ("draft_heads", 0)):
            for value in getattr(self, name):
                check_whole(f"space.{name}", value, least)
        for name in _RANGES:
            bounds = getattr(self, name)
            whole = isinstance(bounds, Sequence) and len(bounds) == 2 and all(type(bound) is int for bound in bounds)
            if not whole or not 1 <= bounds[0] <= bounds[1]:
                raise InputError(f"space.{name}: {bounds} is not a range of whole numbers from 1 on, such as [1,8]")
        for name, plain in (("bridges", "none"), ("draft_heads", 0)):  # empty skips over all tokens are always a choice
            object.__setattr__(self, name, tuple(dict.fromkeys([plain, *getattr(self, name)])))
        check_flag("allow_lossy", self.allow_lossy)
        for name in ("siblings", "protect_first", "protect_last"):
            check_whole(f"space.{name}", getattr(self, name), 0)
        bits = tuple(range(self.protect_first, self.layers - self.protect_last))
        if "layer_skip" in self.kinds and not bits:
            raise InputError(f"space.protect_first, space.protect_last: leave none of {self.layers} layers to skip")
        for mask in self.masks:
            try:
                parsed = SkipMask.parse(str(mask), self.layers)
            except MaskError as error:
                raise InputError(f"space.masks: {mask!r}: {error}") from None
            outside = [i for i in range(self.layers) if (parsed.attention[i] or parsed.mlp[i]) and i not in bits]
            if outside:
                raise InputError(f"space.masks: {mask!r} skips layer {outside[0]}, which is protected")
        object.__setattr__(self, "_bits", bits)

    @property
    def skippable(self) -> tuple[int, ...]:
        """The layers that are not protected."""
        return self._bits

    @property
    def bridged(self) -> bool:
        """Whether anything may stand in for what is skipped, or drafts may be from few tokens."""
        few = any(self.draft_heads) and not {"layer_skip", *self.models}.isdisjoint(self.arms)
        return few or ("layer_skip" in self.arms and set(self.bridges) != {"none"})

    @property
    def models(self) -> dict[str, Sequence[str]]:
        """The draft models of each kind that has some."""
        return {"draft_model": self.drafts, "cross_tokenizer": self.cross_drafts}

    @property
    def heads(self) -> dict[str, Sequence[str]]:
        """The trained heads of each kind that has some."""
        return {"eagle": self.eagle_heads, "medusa": self.medusa_heads}

    @property
    def arms(self) -> tuple[str, ...]:
        """The kinds that a trial chooses from."""
        chosen = {"none", *self.kinds}.difference(() if self.trees else TREES)
        for kind, found in (self.models | self.heads).items():
            if not found:
                chosen.discard(kind)
        if "prompt_lookup" not in chosen or not chosen.difference(_NEVER_SECOND):
            chosen.discard("cascade")
        return tuple(kind for kind in KINDS if kind in chosen)

    @property
    def seconds(self) -> tuple[str, ...]:
        """The kinds that may stand behind the lookup of a cascade."""
        return tuple(kind for kind in self.arms if kind not in _NEVER_SECOND)

    def cascade(self, *members: SpeculativeConfig) -> SpeculativeConfig:
        """A cascade that is told what is known of costs."""
        costs = () if self.draft_cost is None else self.draft_cost(members)
        return SpeculativeConfig("cascade", members=members, verify_cost=self.verify_cost, draft_cost=costs)

    def suggest(self, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
        """The configuration that a trial proposes."""
        config = self._suggest(trial, str(trial.suggest_categorical("kind", self.arms)))
        if not self.allow_lossy or config.kind == "none":
            return config
        rule = str(trial.suggest_categorical("accept", ("exact", "threshold", "typical")))
        if rule == "threshold":
            return replace(config, accept=AcceptRule(rule, trial.suggest_float("accept_threshold", 0.05, 0.95, step=0.05)))
        return replace(config, accept=AcceptRule(rule))

    def _suggest(self, trial: optuna.trial.BaseTrial, kind: str) -> SpeculativeConfig:
        if kind == "cascade":
            # Not "then", whose choices were fewer once: a study that goes on knows one list for each name.
            second = str(trial.suggest_categorical("second", self.seconds))
            return self.cascade(self._suggest(trial, "prompt_lookup"), self._suggest(trial, second))
        if kind == "layer_skip":
            return suggest_skip(self, trial)
        if kind in ("prompt_lookup", "retrieval"):
            return suggest_lookup(self, trial, kind)
        if kind == "token_recycling":
            return SpeculativeConfig(
                kind,
                trial.suggest_int("tree_length", *self.tree_length),
                tree_tokens=trial.suggest_int("tree_tokens", *self.tree_tokens),
                candidates=trial.suggest_int("candidates", *self.candidates),
                least_probability=trial.suggest_float("least_probability", *LEAST_PROBABILITY, log=True),
            )
        if kind == "lookahead":
            length, window = (trial.suggest_int(name, *getattr(self, name)) for name in ("lookahead_length", "window"))
            kept = trial.suggest_int("lookahead_candidates", *self.candidates)
            return SpeculativeConfig(kind, length, window=window, candidates=kept)
        if kind in self.heads:
            return suggest_head(self, trial, kind)
        if kind in self.models:
            prefix = _MODEL_PREFIXES[kind]
            draft = str(trial.suggest_categorical(f"{prefix}draft", tuple(self.models[kind])))
            length = trial.suggest_int(f"{prefix}model_length", *self.model_length)
            found = SpeculativeConfig(kind, length, draft=draft, stop=suggest_stop(trial, f"{prefix}model", self.stops))
            if self.shelf is not None:
                tokens = int(trial.suggest_categorical(f"{prefix}model_draft_head", tuple(self.draft_heads)))
                head = self.shelf.head(tokens) if kind == "draft_model" else self.shelf.head_of(draft, tokens)
                found = replace(found, draft_head=head)
            return found
        return SpeculativeConfig()

    def params(self, config: SpeculativeConfig) -> dict[str, int | float | str]:
        """The choices that lead to a configuration; the reverse of :meth:`suggest`."""
        found: dict[str, int | float | str] = {}
        if config.kind == "cascade":
            for member in config.members:
                found |= self.params(member)
            found["second"] = config.members[1].kind
        elif config.kind == "layer_skip":
            found |= skip_params(self, config)
        elif config.kind in ("prompt_lookup", "retrieval"):
            found |= lookup_params(config)
        elif config.kind == "token_recycling":
            found |= {"tree_length": config.draft_length, "tree_tokens": config.tree_tokens}
            found |= {"candidates": config.candidates, "least_probability": config.least_probability}
        elif config.kind == "lookahead":
            found |= {"lookahead_length": config.draft_length, "window": config.window}
            found |= {"lookahead_candidates": config.candidates}
        elif config.kind in self.heads:
            found |= head_params(self, config)
        elif config.kind in self.models:
            prefix = _MODEL_PREFIXES[config.kind]
            found |= {f"{prefix}draft": config.draft, f"{prefix}model_length": config.draft_length}
            found |= stop_params(config.stop, f"{prefix}model")
            if self.shelf is not None:
                found[f"{prefix}model_draft_head"] = self.shelf.makeup(config).tokens
        if self.allow_lossy and config.kind != "none":
            found["accept"] = config.accept.kind
            if config.accept.kind == "threshold":
                found["accept_threshold"] = config.accept.threshold
        return found | {"kind": config.kind}

    def lookups(self) -> list[SpeculativeConfig]:
        """Every prompt lookup of the space; none where it has none."""
        if "prompt_lookup" not in self.arms:
            return []
        sizes = [(low, high) for high in range(self.ngram[0], self.ngram[1] + 1) for low in range(self.ngram[0], high + 1)]
        lengths = range(self.lookup_length[0], self.lookup_length[1] + 1)
        return [
            SpeculativeConfig("prompt_lookup", length, ngram_min=low, ngram_max=high, match=match)
            for low, high in sizes
            for match in ("last", "first")
            for length in lengths
        ]
