"""The search space: from trials to configurations and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import optuna
import pytest

from layerskip import DraftPlan, StopRule, Target
from layerskip import SpeculativeConfig as Config
from layerskip.config import Costs, methods
from layerskip.draft_plan import NAMES
from searches.app.checks import InputError
from searches.space.search_space import SearchSpace
from searches.study.machine import draft_cost, verify_cost
from searches.study.plan import drop_unsupported
from searches.study.starting_points import starting_points
from tests.families import build

METHODS = tuple(methods())
SECOND_METHODS = tuple(method for method in METHODS if method not in ("none", "prompt_lookup", "cascade"))
PATHS = {
    "retrieval": {"datastore": ("notes",)},
    "draft_model": {"draft_model": ("some/draft",)},
    "cross_tokenizer": {"draft_model": ("other/draft",)},
    "eagle": {"head": ("e",)},
}
SPACE = SearchSpace(layers=12, ranges=PATHS)
SECONDS = [
    Config("retrieval", 6, datastore="notes", prompt_lookup_min=1, prompt_lookup_max=3, tree_tokens=9),
    Config("layer_skip", 5, mask="mlp:4", stop=StopRule("adaptive", 0.4)),
    Config("eagle", 5, head="e", top_k=3, tree_tokens=9),
    Config("cross_tokenizer", 3, draft_model="other/draft", stop=StopRule("threshold", 0.3)),
]


def drawn(space: SearchSpace, count: int) -> list[Config]:
    """Return configurations of random trials, each of which its own parameters lead to."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [space.suggest(study.ask()) for _ in range(count)]
    for config in found:
        assert space.suggest(optuna.trial.FixedTrial(space.params(config))) == config
    return found


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config("layer_skip", 3, mask="attention:2,5;mlp:7", stop=StopRule("threshold", 0.35)),
        Config("prompt_lookup", 5, prompt_lookup_min=2, prompt_lookup_max=4, match="first"),
        Config("retrieval", 6, datastore="notes", prompt_lookup_max=4, tree_tokens=9, min_token_prob=0.1),
        Config("token_recycling", 5, tree_tokens=12, top_k=3, min_token_prob=0.25),
        Config("lookahead", 3, window=6, guess_set_size=5),
        Config("draft_model", 2, draft_model="some/draft", stop=StopRule("adaptive", 0.6)),
        Config("eagle", 5, head="e", top_k=3, tree_tokens=9, min_token_prob=0.02),
        *(Config("cascade", members=(Config("prompt_lookup", 3, prompt_lookup_max=3), second)) for second in SECONDS),
    ],
)
def test_params_and_suggest_are_inverse(config: Config) -> None:
    assert SPACE.suggest(optuna.trial.FixedTrial(SPACE.params(config))) == config


@pytest.mark.parametrize("weights", ["int4", "int8", "int4;head=int8", "int4;layers:3-5=skip;mlp:1,7=int8;attention:9=keep"])
def test_plans_are_chosen_by_sublayer(weights: str) -> None:
    config, space = Config.of("quantized", {"weights": weights}), replace(SPACE, plans=True)
    for one in (config, Config("cascade", members=(Config("prompt_lookup", 3, prompt_lookup_max=3), config))):
        assert space.suggest(optuna.trial.FixedTrial(space.params(one))) == one
        assert space.allows(one)
    assert not space.allows(Config.of("quantized", {"weights": "int4;layers:0=skip"}))  # a protected layer
    assert not replace(space, ranges={"quantized": {"num_speculative_tokens": (5, 6)}}).allows(config)
    assert not replace(space, ranges={"quantized": {"stop": ("adaptive",)}}).allows(config)
    assert space.allows(replace(config, draft_window=512)) and not space.at_context(5).allows(
        replace(config, draft_window=512)
    )
    narrow = replace(space, methods=("quantized",), ranges={"quantized": {"weights": ("int4", "int4;mlp:3=skip")}})
    found = [DraftPlan.parse(one.value("weights"), 12) for one in drawn(narrow, 60) if one.method == "quantized"]
    assert len({plan for plan in found if plan.formats == {4}}) > 10
    assert {bits for plan in found for bits in plan.bits} == {0, 4}
    assert not any(plan.attention[layer] or plan.mlp[layer] for plan in found for layer in (0, 1, 10, 11))


def test_drafts_are_limited_to_the_memory_for_their_copies() -> None:
    def copies(plans: Sequence[DraftPlan]) -> dict[str, int]:
        return {NAMES[bits]: bits * sum(plan.bits.count(bits) for plan in plans) for bits in (8, 4)}

    space = replace(SPACE, plans=True, copies_bytes=copies, memory="0.16KB")  # all at 8 bits take 200
    assert [config.value("weights") for config in space.starts("quantized")] == ["int4"] * 2
    assert len(SPACE.starts("quantized")) == 3
    small, large = (Config.of("quantized", {"weights": weights}) for weights in ("int4;head=int8", "int8;mlp:0-3=keep"))
    lookup = Config("prompt_lookup", 3, prompt_lookup_max=3)
    for config in (small, Config("cascade", members=(lookup, small))):
        assert space.allows(config)
    for config in (large, Config("cascade", members=(lookup, large))):
        assert not space.allows(config)
        over = "copies of weights take 168 bytes, and space.memory is 160"
        assert space.over_memory(config.plans(12)) == over
        assert replace(space, memory=None).allows(config)
    with pytest.raises(InputError, match=r"^space\.memory: 'much' is not a number of bytes"):
        replace(SPACE, memory="much")


def test_windows_are_searched_in_long_contexts_only() -> None:
    chosen = replace(SPACE, ranges=PATHS | {"layer_skip": {"draft_window": (64, 128)}})
    for space, tokens, expected in (
        (SPACE, 500, {0}),
        (SPACE, 5000, {0, 512}),
        (chosen, 500, {0, 64}),
    ):
        found = space.at_context(tokens)
        windows = [
            one.draft_window
            for one in [
                *found.starts("quantized"),
                found.nearest("layer_skip", methods()["layer_skip"].first | {"mask": "mlp:3"}),
            ]
        ]
        assert windows[0] == 0 and set(windows) == expected
        assert found.scanned == (("quantized",) if space is chosen else ("layer_skip", "quantized"))
    found = drawn(replace(SPACE, methods=("quantized",)).at_context(5000), 60)
    assert {one.draft_window for one in found} == {0, 256, 512, 1024, 2048}
    assert {one.draft_window for one in drawn(SPACE.at_context(5), 40)} == {0}


def test_random_trials_stay_within_the_space() -> None:
    found = drawn(SPACE, 200)
    assert {config.method for config in found} == set(METHODS)
    params = [SPACE.params(config) for config in found if config.method == "layer_skip"]
    assert not any(f"{part}_{layer}" in each for each in params for part in ("attention", "mlp") for layer in (0, 1, 10, 11))


def test_trees_are_left_out_if_the_target_cannot_verify_them(capsys: pytest.CaptureFixture[str]) -> None:
    kept = drop_unsupported(SPACE, Target(build("llama")))
    assert kept.trees and set(SPACE.available_methods) - set(kept.available_methods) == {"quantized"}  # nothing is packed
    space = drop_unsupported(SPACE, Target(build("gpt_neo")))
    known = ("none", "prompt_lookup", "layer_skip", "eagle", "draft_model", "cross_tokenizer", "cascade")
    assert space.available_methods == known
    left_out = "lookahead, trees of eagle left out: GPTNeoForCausalLM: cannot verify trees"
    assert left_out in capsys.readouterr().out
    configs = [*starting_points(space), *drawn(space, 100)]
    assert {config.method for config in configs} == set(known)
    for config in configs:
        assert all(member.top_k == 1 for member in (config, *config.members) if member.method == "eagle")


def test_methods_are_available_that_the_space_has_parts_for() -> None:
    """No drafting always is."""
    assert SPACE.second_methods == SECOND_METHODS
    few = SearchSpace(layers=12, methods=("prompt_lookup", "lookahead", "eagle", "cascade"))
    assert few.second_methods == ("lookahead",)
    assert few.available_methods == ("none", "prompt_lookup", "lookahead", "cascade")
    assert not {"eagle", "draft_model", "cross_tokenizer"} & set(SearchSpace(layers=12).available_methods)


def test_a_study_resumes_with_its_stored_costs() -> None:
    """Other costs would change the configurations of the same choices, so the leader would not be measured again."""
    study = optuna.create_study()
    assert verify_cost(study, lambda: (1.5, 1.75)) == verify_cost(study, lambda: (9.0,)) == (1.5, 1.75)

    def measure(members: Sequence[Config], known: dict[str, float]) -> tuple[float, ...]:
        return tuple(known.setdefault(member.method, 0.25) for member in members)

    lookup, window = Config("prompt_lookup"), Config("lookahead")
    assert draft_cost(study, measure)((lookup,)) == (0.25,)
    assert study.user_attrs["draft_cost"] == {"prompt_lookup": 0.25}
    assert draft_cost(study, measure)((lookup, window)) == (0.25, 0.25)
    assert study.user_attrs["draft_cost"] == {"prompt_lookup": 0.25, "lookahead": 0.25}


def test_starting_points_contain_single_skips_runs_and_sparse_masks() -> None:
    points = starting_points(SPACE)
    assert points[0] == Config()
    assert [SPACE.suggest(optuna.trial.FixedTrial(SPACE.params(config))) for config in points] == points
    masks = [config.mask for config in points if config.method == "layer_skip"]
    assert any(mask.startswith("attention:") and mask.count(",") == 0 for mask in masks)
    assert any(mask.startswith("mlp:") for mask in masks)
    assert sum("-" in mask and mask.startswith("layers:") for mask in masks) >= 2
    assert any(mask.count(",") >= 1 for mask in masks)


def _cascades(space: SearchSpace, proposed: Sequence[Config] = ()) -> list[Config]:
    """Return the second members of the cascades among the starting points."""
    pairs = [config.members for config in starting_points(space, proposed) if config.method == "cascade"]
    assert all(lookup.method == "prompt_lookup" for lookup, _ in pairs)
    return [second for _, second in pairs]


def test_the_best_predicted_mask_is_tried_after_a_lookup() -> None:
    best, other = (Config("layer_skip", 3, mask=f"mlp:{layer}") for layer in (4, 5))
    proposed = [Config("prompt_lookup", 5), best, other]
    space = SearchSpace(layers=12, methods=("none", "prompt_lookup", "layer_skip", "cascade"))
    assert _cascades(space, proposed) == [best]
    seconds = [second.method for second in _cascades(SearchSpace(layers=12), proposed)]
    assert seconds == ["token_recycling", "quantized", "layer_skip"]
    assert not _cascades(replace(space, methods=("none", "prompt_lookup", "layer_skip")), proposed)


@pytest.mark.parametrize("trees", [True, False])
def test_the_first_head_is_tried_after_a_lookup(trees: bool) -> None:
    heads = {"eagle": {"head": ("one", "other")}}
    seconds = _cascades(SearchSpace(layers=12, methods=METHODS, trees=trees, ranges=heads))
    tried = [(second.method, second.head, second.top_k > 1) for second in seconds if second.head]
    assert tried == [("eagle", "one", trees)]


def test_cascades_have_the_costs_of_the_space() -> None:
    space = replace(SPACE, verify_cost=(1.5, 1.6), draft_cost=lambda members: (0.0, 0.5 * len(members)))
    cascades = [config for config in starting_points(space) if config.method == "cascade"]
    assert {(config.verify_cost, config.draft_cost) for config in cascades} == {((1.5, 1.6), (0.0, 1.0))}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.enqueue_trial({"method": "cascade"})
    assert space.suggest(study.ask()).verify_cost == space.verify_cost


@pytest.mark.parametrize("method", SECOND_METHODS)
def test_every_space_with_cascades_has_one_among_its_starting_points(method: str) -> None:
    assert [second.method for second in _cascades(replace(SPACE, methods=("prompt_lookup", method, "cascade")))] == [method]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"methods": ("hydra",)}, "methods"),
        ({"ranges": {"hydra": {"num_speculative_tokens": (1, 2)}}}, "ranges"),
        ({"ranges": {"eagle": 4}}, "ranges.eagle"),
        ({"ranges": {"eagle": {"prompt_lookup_min": (1, 2)}}}, "ranges.eagle"),
        ({"ranges": {"eagle": {"stop": ()}}}, "ranges.eagle.stop"),
        ({"ranges": {"eagle": {"head": "mine"}}}, "ranges.eagle.head"),
        ({"ranges": {"layer_skip": {"num_speculative_tokens": (0, 4)}}}, "ranges.layer_skip.num_speculative_tokens"),
        ({"ranges": {"layer_skip": {"num_speculative_tokens": 4}}}, "ranges.layer_skip.num_speculative_tokens"),
        ({"ranges": {"layer_skip": {"draft_window": (0, -5)}}}, "ranges.layer_skip.draft_window"),
        *(
            ({"ranges": {"quantized": {"weights": (text,)}}}, "ranges.quantized.weights")
            for text in ("int3", "int4;mlp:30", "int4;layers:0=skip")
        ),
        ({"ranges": {"prompt_lookup": {"prompt_lookup_min": (3, 2)}}}, "ranges.prompt_lookup.prompt_lookup_min"),
        ({"ranges": {"eagle": {"min_token_prob": (0, 0.5)}}}, "ranges.eagle.min_token_prob"),
        ({"ranges": {"prompt_lookup": {"prompt_lookup_min": (3, 4), "prompt_lookup_max": (1, 2)}}}, "ranges.prompt_lookup"),
        ({"methods": ("none", "cascade")}, "methods: a cascade is prompt_lookup and another method"),
        ({"protect_first": -1}, "protect_first"),
        ({"protect_first": 6, "protect_last": 6}, "protect_first"),
        ({"masks": ("layers:40",)}, "masks"),
        ({"masks": ("layers:0",)}, "masks"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=f"^space.{named}"):
        SearchSpace(layers=12, **fields)  # type: ignore[arg-type]


def test_a_field_is_chosen_from_the_ranges_of_its_method() -> None:
    narrow = SPACE.narrowed(["eagle"], num_speculative_tokens=(7, 7), stop=("threshold",)).narrowed(match=("first",))
    found = drawn(narrow, 150)
    assert {config.num_speculative_tokens for config in found if config.method == "eagle"} == {7}
    chains = [config.stop for config in found if config.method == "eagle" and config.top_k == 1]
    assert {stop.method for stop in chains} == {"threshold"}
    assert {stop.threshold for stop in chains} <= {round(0.1 + 0.05 * step, 2) for step in range(17)}  # those of scans
    assert {config.match for config in found if config.method == "prompt_lookup"} == {"first"}
    assert len({config.num_speculative_tokens for config in found if config.method == "token_recycling"}) > 1
    starts = [(config.num_speculative_tokens, config.top_k, config.stop.method) for config in narrow.starts("eagle")]
    assert starts == [(7, 4, "length"), (7, 1, "threshold")]


def test_every_lookup_is_one_that_trials_may_propose() -> None:
    space = SearchSpace(layers=12, ranges={"prompt_lookup": {"prompt_lookup_max": (2, 3), "num_speculative_tokens": (2, 3)}})
    found = space.lookups()
    assert len(found) == len(set(found)) == (2 + 3) * 2 * 2
    for config in found:
        assert space.suggest(optuna.trial.FixedTrial(space.params(config))) == config


@pytest.mark.parametrize(
    ("costs", "length"),
    [((), 8), ((1.0,) * 12, 8), ((1.1, 1.2, 1.3, 1.7, 2.0, 2.3, 2.6, 3.0, 3.3), 3), ((1.1, 2.0, 3.0), 1)],
)
def test_first_drafts_are_as_long_as_verification_is_cheap(costs: Costs, length: int) -> None:
    space = SearchSpace(30, ("prompt_lookup", "token_recycling", "cascade"), verify_cost=costs)
    lookup, recycling = (space.starts(method)[0] for method in ("prompt_lookup", "token_recycling"))
    (cascade,) = space.after_lookup([recycling])
    assert lookup.num_speculative_tokens == cascade.members[0].num_speculative_tokens == max(2, length)
    assert recycling.tree_tokens == max(4, length)
