"""Draft trees: the logits of each branch, acceptance of siblings by the target's distribution, and growth by levels."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from layerskip.decoding.draft import DeviceTree, Draft
from layerskip.decoding.tree import path_to, tree_model, tree_shape
from layerskip.decoding.tree_growth import LevelwiseTree
from layerskip.decoding.verify import verify
from layerskip.models.architecture import UnsupportedModel
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.target import Target
from tests.accelerator import DEVICE
from tests.chi_square import assert_follows
from tests.drafters.recorder import branches_of
from tests.exhaustive import representative
from tests.families import REPRESENTATIVE, build

PROMPT = 20  # more than twice the sliding windows and chunks of tests.families
PARENTS = (-1, -1, 0, 0, 1, 2, 5, 5, 3, 7)
V = 3
REFUSED_TREES = {
    "gpt_neo": "a branch of a tree gives other logits than the same tokens in a chain",
    "llama4_text": "its queries are scaled by their place in the block",
}
TREES = [family for family in REPRESENTATIVE if family not in REFUSED_TREES]


@pytest.mark.parametrize(
    ("family", "recorded"),
    representative(
        [*((family, False) for family in TREES), ("gemma3_text", True), ("llama", True)],
        [(family, True) for family in TREES if family not in ("gemma3_text", "llama")],
    ),
)
def test_a_branch_gives_the_logits_of_the_same_chain(family: str, recorded: bool) -> None:
    """Also for tokens after the tree, once the accepted branch was gathered in the cache."""
    model = build(family)
    tokens = torch.randint(3, 64, (PROMPT + len(PARENTS) + 3,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    prompt, block, more = tokens.split((PROMPT, len(PARENTS) + 1, 2))
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)

    def check(found: Tensor, *sequence: Tensor) -> None:
        expected = model(input_ids=torch.cat(sequence)[None], use_cache=False).logits[0, -1]
        torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.abs().max()) * 2e-5)

    with torch.inference_mode():
        cache = (CapturingCache if recorded else KVCache)(layers, tokens.shape[0] + 8, device=torch.device(DEVICE))
        forward(model, prompt, cache, last=1)
        cache.length = PROMPT
        logits = tree_model(model).run(block, PARENTS, cache)
        for node in range(len(PARENTS)):
            branch = [0, *(step + 1 for step in path_to(node, PARENTS))]
            check(logits[node + 1], prompt, block[branch])
        check(logits[0], prompt, block[:1])
        accepted = [0, *(step + 1 for step in path_to(9, PARENTS))]
        cache.gather(accepted)
        cache.length += len(accepted)
        check(forward(model, more, cache, last=1)[0], prompt, block[accepted], more)


@torch.inference_mode()
def test_nan_in_the_padding_of_a_recorded_tree_changes_nothing() -> None:
    """The padding has keys and values, too."""
    model = build("llama")
    trees = tree_model(model)
    model.get_input_embeddings().weight[0] = float("nan")
    tokens = torch.arange(3, 3 + PROMPT + 4, device=DEVICE)
    cache = CapturingCache(4, 64, torch.device(DEVICE))
    forward(model, tokens[:PROMPT], cache, last=1)
    cache.length = PROMPT
    for _ in range(2):
        assert trees.run(tokens[PROMPT:], (-1, -1, 0), cache).isfinite().all()
    assert any(cache._passes.values())


@pytest.mark.parametrize("family", REFUSED_TREES)
def test_a_model_whose_branches_differ_from_chains_is_refused_by_name(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"ForCausalLM: cannot verify trees: {REFUSED_TREES[family]}"):
        tree_model(build(family))


def test_a_parent_must_come_before_its_node() -> None:
    with pytest.raises(ValueError, match="parents: 1 does not come before node 1"):
        tree_shape((-1, 1), torch.device("cpu"))


P = torch.tensor([[0.1, 0.3, 0.6], [0.5, 0.2, 0.3], [0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.3, 0.3, 0.4]])


def _on_device(parents: Sequence[int], more: int) -> DeviceTree:
    """The shape that the device knows alone, filled up with tokens that do not count."""
    depth = max(len(path_to(node, parents)) for node in range(len(parents)))
    return DeviceTree(torch.tensor([*parents, *(-1,) * more]), torch.tensor([len(parents)]), depth)


@pytest.mark.parametrize("more", [0, 3])
def test_a_shape_on_the_device_equals_that_on_the_host(more: int) -> None:
    for parents in itertools.product(*(range(-1, node) for node in range(5))):
        expected = tree_shape((*parents, *(-1,) * more), torch.device("cpu"))
        found = tree_shape(_on_device(parents, 0), torch.device("cpu"), more)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_tokens_committed_from_a_tree_follow_the_target(on_device: bool) -> None:
    """Two siblings, the first with two children: every committed token follows the row of its parent."""
    parents, generator = (-1, -1, 0, 0), torch.Generator().manual_seed(1)
    draft, rows = Draft(torch.tensor([0, 1, 2, 1]), parents), P
    if on_device:  # with one more child of the root that is likely and does not count
        draft, rows = Draft(torch.tensor([0, 1, 2, 1, 2]), _on_device(parents, 1)), torch.cat((P, P[:1]))
    behind: dict[int, list[int]] = {node: [] for node in range(-1, 4)}
    for _ in range(3000):
        verdict = verify(draft, rows, generator)
        assert (verdict.parents, verdict.drafted) == (parents, (0, 1, 2, 1))
        assert verdict.path is not None and len(verdict.committed) == verdict.accepted + 1
        for node, token in zip((-1, *verdict.path), verdict.committed, strict=True):
            behind[node].append(token)
    for node, tokens in behind.items():
        assert len(tokens) > 60
        assert_follows(tokens, dict(enumerate(P[node + 1].tolist())))


def test_drawn_tokens_are_refused_in_a_tree() -> None:
    with pytest.raises(ValueError, match=r"^draft\.probs: "):
        verify(Draft(torch.tensor([0, 1]), (-1, -1), P[:2]), P[:3])


def test_greedy_trees_accept_the_longest_matching_branch() -> None:
    parents = (-1, -1, 0, 1, 1, 4)
    for drafted in itertools.product(range(2), repeat=len(parents)):
        target = torch.tensor([random.Random(str((drafted, row))).randrange(2) for row in range(len(parents) + 1)])
        verdict = verify(Draft(torch.tensor(drafted), parents), target)
        node, path = -1, []
        while True:
            found = [n for n, parent in enumerate(parents) if parent == node and drafted[n] == target[node + 1]]
            if not found:
                break
            node = found[0]
            path.append(node)
        assert (verdict.path, verdict.next_token) == (tuple(path), int(target[node + 1]))
        assert verdict.last.tolist() == [verdict.next_token]
        filled = torch.tensor([*drafted, target[0]]), torch.cat((target, target[:1]))  # the last token does not count
        late = verify(Draft(filled[0], _on_device(parents, 1)), filled[1], late=[torch.tensor([0.1, 7.0])])
        assert late == verdict
        assert late.late == [torch.tensor([0.1, 7.0]).tolist()]


def test_a_real_model_in_half_precision_verifies_trees(smollm2: Target) -> None:
    """Its first tokens are untrained special ones, for which rounding errors are amplified beyond all bounds."""
    model = copy.deepcopy(smollm2.model).to(torch.bfloat16)
    assert tree_model(model) is tree_model(model)


ROOT = torch.tensor([7])


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("width", "size", "minimum"), [(30, 9, 0.0), (30, 30, 0.05), (30, 100, 0.0), (30, 5, 2.0)])
def test_a_wide_tree_has_the_likeliest_of_all_branches(width: int, size: int, minimum: float, reads: bool) -> None:
    """All nodes of a level have the same children."""
    levels = torch.rand(3, 3, generator=torch.Generator().manual_seed(size)).softmax(-1)
    tree = LevelwiseTree(ROOT, width, minimum, reads)
    for number, level in enumerate(levels):
        tree.add_level(level[None], torch.tensor([[10, 20, 30]]) + number)
    known = tree.draft(size)
    assert reads or (isinstance(known.parents, DeviceTree) and known.tokens.shape[0] == min(size, 3 + 9 + 27))
    found = branches_of(known)
    chances = {
        tuple(10 * place + 10 + number for number, place in enumerate(places)): math.prod(
            float(levels[number, place]) for number, place in enumerate(places)
        )
        for depth in (1, 2, 3)
        for places in itertools.product(range(3), repeat=depth)
    }
    expected = sorted((branch for branch in chances if chances[branch] >= minimum), key=lambda branch: -chances[branch])
    assert found == expected[:size]


@pytest.mark.parametrize("reads", [False, True])
def test_the_front_leads_back_to_its_parents(reads: bool) -> None:
    tree = LevelwiseTree(ROOT, 2, 0.1, reads)
    parents, tokens = tree.add_level(torch.tensor([[0.2, 0.5, 0.3]]), torch.tensor([[1, 2, 3]]))
    assert (parents.tolist(), tokens.tolist()) == ([0, 0], [2, 3])
    # After 2: 0.15 and 0.05, which is too little; after 3: 0.24 and 0.06.
    parents, tokens = tree.add_level(torch.tensor([[0.3, 0.1], [0.8, 0.2]]), torch.tensor([[4, 5], [6, 7]]))
    assert (parents.tolist(), tokens.tolist()) == ([1, 0], [6, 4])
    # After 6: 0.12; of the others none is likely, and one of them fills the front.
    parents, tokens = tree.add_level(torch.tensor([[0.5, 0.0], [0.5, 0.0]]), torch.tensor([[8, 9], [8, 9]]))
    assert (parents.tolist(), tokens.tolist()) == (([0], [8]) if reads else ([0, 0], [8, 9]))
    draft = tree.draft(9)
    assert reads or draft.tokens.tolist() == [2, 3, 6, 1, 4, 8, 7, 7, 7]
    draft = draft.read_shape()
    assert (draft.tokens.tolist(), draft.parents) == ([2, 3, 6, 1, 4, 8], (-1, -1, 1, -1, 0, 2))
