"""Drafting with an EAGLE head: the contract, chains and trees, and drafts that equal training's predictions."""

from __future__ import annotations

import pytest
import torch

from layerskip.config import StopRule
from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.drafter import NoDraft
from layerskip.drafters.eagle import Eagle
from layerskip.heads.eagle import EagleHead
from layerskip.heads.feature_store import TextFeatures, read_features
from layerskip.heads.readout import Readout
from layerskip.heads.training import Batch, acceptance, predict_tokens
from layerskip.models.compiled_layers import set_compiling
from layerskip.models.target import Target
from tests.accelerator import DEVICE, decode_static
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, Tokens, contract, generated, target_of
from tests.drafters.members import UNROLL, eagle_head, family_of, member_of
from tests.drafters.recorder import Recorder
from tests.exhaustive import representative
from tests.models.compilers import rewrite_only


def _eagle(target: Target, head: EagleHead, length: int = 3, stop: StopRule | None = None, **tree: float) -> Eagle:
    return Eagle(head, target, length, stop or StopRule(), **tree)  # type: ignore[arg-type]


_TREE = {"top_k": 3, "tree_tokens": 7, "min_token_prob": 0.01}
# It drafts from a part of the vocabulary.
TestFewTokens = contract(
    lambda target: _eagle(target, eagle_head(family_of(target), target.vocabulary - 1), 4, StopRule("threshold", 0.2))
)
# It looks further back than prompts reach.
TestTreesLookingBack = contract(
    lambda target: _eagle(target, eagle_head(family_of(target), lookback=9), **_TREE),
    samples_by_default=False,
    trees=True,
)


@pytest.mark.parametrize("lookback", [0, 9])
def test_drafts_equal_the_predictions_of_training(lookback: int) -> None:
    """One unrolled pass over a whole text, against token-by-token drafting on a cache that is rewound."""
    target, head = target_of("llama"), eagle_head("llama", lookback=lookback)
    checked = 0
    for prompt in PROMPTS[1:]:
        recorder = Recorder(_eagle(target, head))
        tokens = (*prompt, *decode(target, recorder, prompt, GREEDY, LENGTH).tokens)
        text = TextFeatures(torch.tensor(tokens), read_features(target, tokens), 0)
        readout = Readout(target, head.tokens)
        with torch.no_grad():
            predictions = predict_tokens(head, target.model.get_input_embeddings(), Batch.of([text], DEVICE), UNROLL)
        for context, branches in recorder.drafts:
            row, begin = len(context) - 2, len(context)
            for step, token in enumerate(branches[-1]):
                if row >= predictions[step].hidden.shape[0] or branches[-1][:step] != tokens[begin : begin + step]:
                    break
                assert token == int(readout(predictions[step].hidden[row]).argmax())
                checked += 1
    assert checked > 60


def test_a_round_without_a_likely_token_drafts_nothing() -> None:
    """Within a text, and the following drafts are right."""
    target = target_of("llama")
    recorder = Recorder(_eagle(target, eagle_head("llama"), top_k=3, tree_tokens=7, min_token_prob=0.4))
    for prompt in PROMPTS:
        assert decode(target, recorder, prompt, GREEDY, LENGTH).tokens == generated("llama", prompt, LENGTH)
    empty = [not branches for _, branches in recorder.drafts]
    assert 0.1 < sum(empty) / len(empty) < 0.9


def test_training_acceptance_equals_that_of_drafts_at_every_position() -> None:
    """One pass over each text, against a real decoding from each of its positions."""
    target, head, steps = target_of("llama"), eagle_head("llama"), 2
    texts, right, tried = [], [0] * steps, [0] * steps
    for prompt in PROMPTS[1:]:
        tokens = (*prompt, *decode(target, NoDraft(), prompt, GREEDY, 24).tokens)
        # The first new token comes from the prefill, before any draft.
        texts.append(TextFeatures(torch.tensor(tokens), read_features(target, tokens), len(prompt) + 1))
        for end in range(len(prompt), len(tokens) - steps):
            drafted = decode(target, _eagle(target, head, steps), tokens[:end], GREEDY, steps + 2).stats.rounds[0].accepted
            for step in range(min(drafted + 1, steps)):
                tried[step] += 1
                right[step] += step < drafted
    found = acceptance(head, target.model.get_input_embeddings(), Readout(target, head.tokens), texts, steps)
    assert found == [a / b for a, b in zip(right, tried, strict=True)]
    assert 0 < found[0] < 1


def _rebuilt(target: Target, head: EagleHead, context: Tokens, width: int, depth: int) -> dict[Tokens, float]:
    """Returns the probabilities of all branches after a context, from whole passes of target and head without a cache."""
    embeddings, readout = target.model.get_input_embeddings(), Readout(target, head.tokens)
    known = read_features(target, context[:-1])
    readout.follow(context)

    def think_of(branch: Tokens) -> torch.Tensor:
        own = [think_of(branch[:level]) for level in range(len(branch))]
        embedded = embeddings(torch.tensor([*context, *branch], device=DEVICE))[None]
        found: torch.Tensor = head(head.with_lookback(embedded, embedded.shape[1] - 1), torch.stack([*known, *own])[None])
        return found[0, -1]

    chances: dict[Tokens, float] = {(): 1.0}
    front: list[Tokens] = [()]
    for _ in range(depth):
        born = {}
        for branch in front:
            probs = readout(think_of(branch)).softmax(-1)
            for place in probs.argsort(descending=True)[:width]:
                born[*branch, int(readout.tokens_at(place))] = chances[branch] * float(probs[place])
        chances |= born
        front = sorted(born, key=lambda branch: -born[branch])[:width]
    del chances[()]
    return chances


@pytest.mark.parametrize(
    ("few", "back", "width", "size"),
    representative(
        [(0, 0, 3, 12), (3, 2, 2, 6)],
        [(0, 9, 2, 6), (3, 2, 3, 12), (0, 9, 3, 12)],
    ),
)
def test_trees_equal_those_computed_without_a_cache(few: int, back: int, width: int, size: int) -> None:
    """At every level, after prompts and after rejected tokens."""
    target, deepest = target_of("llama"), 0
    head = eagle_head("llama", target.vocabulary - few if few else None, back)
    for prompt in PROMPTS[1:4]:
        recorder = Recorder(_eagle(target, head, 4, top_k=width, tree_tokens=size))
        decode(target, recorder, prompt, GREEDY, LENGTH, stops=Stops(frozenset()))
        for context, branches in recorder.drafts[:4]:
            with torch.no_grad():
                chances = _rebuilt(target, head, context, width, 4)
            assert set(branches) == set(sorted(chances, key=lambda branch: -chances[branch])[:size])
            deepest = max(deepest, *map(len, branches))
    assert deepest > 2


@pytest.mark.skipif(DEVICE != "cpu", reason="stands in for a GPU")
def test_compiled_heads_draft_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("llama")
    set_compiling(target.model, "off")
    graphs = rewrite_only(monkeypatch)
    found = []
    for mode in ("off", "auto"):
        drafter = member_of("eagle", target)
        assert isinstance(drafter, Eagle)
        set_compiling(drafter.head.body, mode)
        recorder = Recorder(drafter)
        for prompt in PROMPTS[1:3]:
            tokens = decode_static(target, recorder, prompt, GREEDY, LENGTH).tokens
            assert tokens == generated("llama", prompt, LENGTH)
        found.append(recorder.drafts)
        set_compiling(drafter.head.body, "auto")
        assert bool(graphs) == (mode == "auto")
    set_compiling(target.model, "auto")
    assert found[0] == found[1]
