"""Lossy rules of acceptance: which tokens pass, and that configurations are marked as lossy."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import torch

from layerskip.config import AcceptRule, SpeculativeConfig
from layerskip.decoding.decode import decode
from layerskip.decoding.draft import DeviceTree, Draft
from layerskip.decoding.verify import accept_lossy
from layerskip.drafters.registry import build_drafter
from searches.space.search_space import SearchSpace
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, generated, target_of

P = torch.tensor([[0.5, 0.3, 0.2, 1e-9], [0.05, 0.9, 0.05, 1e-9], [0.25, 0.25, 0.25, 0.25]])
OWN = P.argmax(-1)


@pytest.mark.parametrize(
    ("rule", "drafted", "committed"),
    [
        (AcceptRule("threshold", 0.25), [1, 1], [1, 1, int(OWN[2])]),
        (AcceptRule("threshold", 0.35), [1, 1], [0]),
        (AcceptRule("threshold", 0.35), [0, 0], [0, 1]),
    ],
)
def test_tokens_that_the_target_finds_likely_enough_are_accepted(
    rule: AcceptRule, drafted: list[int], committed: list[int]
) -> None:
    assert accept_lossy(Draft(torch.tensor(drafted)), OWN, P.log(), rule).committed == committed


def test_the_deepest_branch_of_a_tree_is_accepted() -> None:
    """The branch of the likelier first token ends there; after the other one a second token passes, the likelier of two."""
    tree = Draft(torch.tensor([0, 1, 0, 3, 2]), (-1, -1, 0, 1, 1))
    rows = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.05, 0.85, 0.05, 0.05], [0.1, 0.1, 0.5, 0.3], *[[0.25] * 4] * 3])
    verdict = accept_lossy(tree, rows.argmax(-1), rows.log(), AcceptRule("threshold", 0.2))
    assert (verdict.path, verdict.committed[:2]) == ((1, 4), [1, 2])
    # The same with a shape on the device, filled up with a likely token that does not count.
    shape = DeviceTree(torch.tensor([-1, -1, 0, 1, 1, -1]), torch.tensor([5]), 2)
    filled, more = Draft(torch.tensor([0, 1, 0, 3, 2, 0]), shape), torch.cat((rows, rows[:1]))
    late = [torch.tensor([7])]
    again = accept_lossy(filled, more.argmax(-1), more.log(), AcceptRule("threshold", 0.2), late=late)
    assert (again, again.late) == (verdict, [[7]])


@pytest.mark.parametrize("method", ["layer_skip", "token_recycling"])
def test_a_lossy_rule_accepts_more_and_changes_the_output(method: str) -> None:
    target, changed = target_of("llama"), False
    fields: dict[str, Any] = {"layer_skip": {"mask": "layers:1-2"}, "token_recycling": {"min_token_prob": 0.0}}[method]
    exact = SpeculativeConfig.from_dict({"method": method} | fields)
    lossy = SpeculativeConfig.from_dict({"method": method, "accept": {"method": "threshold", "threshold": 0.0}} | fields)
    for prompt in PROMPTS:
        kept, other = (decode(target, build_drafter(config, target), prompt, GREEDY, LENGTH) for config in (exact, lossy))
        assert kept.tokens == generated("llama", prompt, LENGTH)
        assert len(other.tokens) == LENGTH
        assert len(other.stats.rounds) <= len(kept.stats.rounds)
        changed |= other.tokens != kept.tokens
    assert changed


def test_a_lossy_configuration_is_marked_as_lossy() -> None:
    config = SpeculativeConfig.from_dict({"method": "layer_skip", "accept": {"method": "threshold", "threshold": 0.5}})
    assert not config.lossless and config.to_dict()["lossless"] is False
    assert "LOSSY" in config.label()
    assert SpeculativeConfig.from_dict(config.to_dict()) == config
    assert "lossless" not in SpeculativeConfig("layer_skip").to_dict()


def test_a_space_has_lossy_rules_only_if_they_are_allowed() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    assert all(SearchSpace(layers=12).suggest(study.ask()).lossless for _ in range(50))
    allowed = SearchSpace(layers=12, allow_lossy=True)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    configs = [allowed.suggest(study.ask()) for _ in range(60)]
    assert {config.accept.method for config in configs} == {"exact", "threshold"}
    for config in configs:
        assert allowed.suggest(optuna.trial.FixedTrial(allowed.params(config))) == config
