"""Growth of trees level by level, against an enumeration of all branches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from layerskip.decoding.draft import DeviceTree
from layerskip.decoding.tree_growth import LevelwiseTree
from tests.drafters.recorder import branches_of

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
