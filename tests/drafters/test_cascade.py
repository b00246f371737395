"""Several drafters in turn: the contract, who is asked, and who hears what."""

from __future__ import annotations

import copy

import pytest
import torch

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, Said
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Cascade
from layerskip.drafters.cross_tokenizer import CrossTokenizer
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import Eagle
from layerskip.drafters.registry import build_drafter
from layerskip.heads.readout import Readout
from layerskip.models.cache import KVCache
from layerskip.models.target import Target
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, SAMPLINGS, DrafterContract, Recorder, generated, target_of
from tests.drafters.heads import eagle_head, family_of
from tests.drafters.members import LOOKUP, SKIP, Choosing, Member, member_of
from tests.drafters.test_cross_tokenizer import _other_letters
from tests.drafters.test_draft_model import _like
from tests.drafters.test_token_recycling import experienced
from tests.families import build


def _skip(target: Target) -> dict[str, object]:
    return SKIP | {"mask": "attention:0" if target.layers == 1 else SKIP["mask"]}


class TestLookupThenLayerSkip(Choosing):
    def drafter(self, target: Target) -> Drafter:
        skip = _skip(target)
        return build_drafter(SpeculativeConfig.from_dict({"kind": "cascade", "members": [LOOKUP, skip]}), target)


class TestLookupThenTrees(DrafterContract):
    trees = True
    learns = True
    remembers = True

    def drafter(self, target: Target) -> Drafter:
        """The second has decoded before, so that it has something to draft."""
        return Cascade([member_of("prompt_lookup", target), copy.deepcopy(experienced(target))])


class TestLookupThenWindow(Choosing):
    """The second hears of passes that the first has drafted for, in which it asked nothing."""

    trees = True
    samplings = SAMPLINGS[1:2]

    def drafter(self, target: Target) -> Drafter:
        window = {"kind": "lookahead", "draft_length": 2, "window": 3, "candidates": 2}
        return build_drafter(SpeculativeConfig.from_dict({"kind": "cascade", "members": [LOOKUP, window]}), target)


class TestLookupThenSiblings(Choosing):
    trees = True
    samplings = SAMPLINGS[1:2]

    def drafter(self, target: Target) -> Drafter:
        skip = _skip(target) | {"siblings": 1}
        return build_drafter(SpeculativeConfig.from_dict({"kind": "cascade", "members": [LOOKUP, skip]}), target)


class TestLookupThenDraftModel(Choosing):
    samplings = SAMPLINGS[1:2]

    def drafter(self, target: Target) -> Drafter:
        """The second's cache lags behind whenever the first has drafted."""
        model = build("llama", 1, vocab_size=target.vocabulary, num_hidden_layers=1)
        return Cascade([member_of("prompt_lookup", target), DraftModel(model, 1, 3, StopRule())])


SURE, LESS_SURE = StopRule("threshold", 0.6), StopRule("threshold", 0.3)  # of models, and of worse drafters


class SureFirst(DrafterContract):
    """The first leaves a round to the second where it is unsure of its first token, drawn or not."""

    samplings = SAMPLINGS[:1]

    def test_both_have_their_rounds(self) -> None:
        target, rounds, asked = target_of("llama"), set(), set()
        for prompt in PROMPTS:
            cascade = self.drafter(target)
            assert isinstance(cascade, Cascade)
            first, second = cascade.members
            cascade.members = (first, recorder := Recorder(second))
            decode(target, watched := Recorder(cascade), prompt, GREEDY, LENGTH)
            rounds |= {context for context, _ in watched.drafts}
            asked |= {context for context, _ in recorder.drafts}
        assert set() < asked < rounds


class TestSureModelThenLookup(SureFirst):
    samplings = SAMPLINGS

    def drafter(self, target: Target) -> Drafter:
        return Cascade([DraftModel(_like(target), target.layers, 3, SURE), member_of("prompt_lookup", target)])


class TestSureModelWhoAdaptsThenLookup(SureFirst):
    remembers = True

    def drafter(self, target: Target) -> Drafter:
        stop = StopRule("adaptive", 0.5, 0.5, step=0.5, threshold_decay=0.5)
        return Cascade([DraftModel(_like(target), target.layers, 3, stop), member_of("prompt_lookup", target)])

    def test_what_is_drafted_depends_on_the_context_alone(self) -> None:
        pytest.skip("who drafts depends on a threshold that follows the rounds before")


class TestSureSiblingsThenModel(SureFirst):
    trees = True

    def drafter(self, target: Target) -> Drafter:
        skip = _skip(target) | {"siblings": 1, "stop": SURE.to_dict()}
        sure = build_drafter(SpeculativeConfig.from_dict(skip), target)
        return Cascade([sure, DraftModel(_like(target), target.layers, 2, SURE)])

    def test_what_is_drafted_depends_on_the_context_alone(self) -> None:
        pytest.skip("and on the room that is left: no stop rule is asked about the only token of a draft")


class TestSureSpellerThenLookup(SureFirst):
    def drafter(self, target: Target) -> Drafter:
        model, translation = _other_letters(target)
        sure = CrossTokenizer(model, target.layers, model.config.vocab_size, translation, 3, LESS_SURE)
        return Cascade([sure, member_of("prompt_lookup", target)])


class TestSureHeadThenLookup(SureFirst):
    def drafter(self, target: Target) -> Drafter:
        head, embeddings = eagle_head(family_of(target)), target.model.get_input_embeddings()
        sure = Eagle(head, embeddings, Readout(target, head.tokens), 3, LESS_SURE)
        return Cascade([sure, member_of("prompt_lookup", target)])


@pytest.mark.parametrize("proposes", [True, False])
def test_an_unsure_draft_is_taken_where_nobody_is_surer(proposes: bool) -> None:
    """How sure the model is of its first token is told by plain passes of it; alone, it drafts one token then."""
    target = target_of("llama")
    model, unsure = _like(target), 0
    for prompt in PROMPTS:
        second = Member()
        second.proposes = proposes
        rounds = Recorder(Cascade([DraftModel(model, target.layers, 3, SURE), second]))
        assert decode(target, rounds, prompt, GREEDY, LENGTH).tokens == generated("llama", prompt, LENGTH)
        for context, drafted in rounds.drafts:
            with torch.no_grad():
                chances = model(torch.tensor([context])).logits[0, -1].softmax(-1)
            if float(chances.max()) < SURE.threshold and len(context) < len(prompt) + LENGTH - 2:
                assert drafted == [(1,) if proposes else (int(chances.argmax()),)]
                unsure += 1
            else:
                assert drafted[0] == (int(chances.argmax()),)
        assert ("observe" in second.told) == proposes
    assert unsure


def test_the_first_with_a_proposal_drafts_and_all_hear() -> None:
    first, second = Member(), Member()
    cascade = Cascade([first, second])
    last = torch.tensor([1])
    context, said = Context([1], last), Said(last, torch.zeros(1, 3))
    cascade.start([1], KVCache(1, 4), None)  # type: ignore[arg-type]
    for proposals in ((True, True), (False, True), (False, False)):
        first.proposes, second.proposes = proposals
        assert cascade.draft(context, 4).tokens.shape[0] == any(proposals)
        cascade.observe(Verdict((1,), 0, 2, last))
        cascade.hear(said)
    assert first.told == ["start", *("draft", "observe", "hear"), *("draft", "hear"), *("draft", "hear")]
    assert second.told == ["start", "hear", *("draft", "observe", "hear"), *("draft", "hear")]


def test_who_was_never_asked_has_kept_the_request_for_the_next_one() -> None:
    target, first = target_of("llama"), Member()
    cascade = Cascade([first, member_of("retrieval", target)])
    told = decode(target, cascade, PROMPTS[2], GREEDY, LENGTH)
    first.proposes = False
    again = decode(target, cascade, PROMPTS[2], GREEDY, LENGTH)
    fresh = decode(target, member_of("retrieval", target), PROMPTS[2], GREEDY, LENGTH)
    assert told.tokens == again.tokens == fresh.tokens == generated("llama", PROMPTS[2], LENGTH)
    assert len(again.stats.rounds) < len(fresh.stats.rounds)
    assert again.stats.rounds[0].accepted > 0  # of what only the request before can have taught it


class Often(Member):
    """Drafts in two of three rounds."""

    def draft(self, context: Context, limit: int) -> Draft:
        self.proposes = self.told.count("draft") % 3 < 2
        return super().draft(context, limit)


SECONDS = ("prompt_lookup", "retrieval", "token_recycling", "lookahead", "layer_skip")
TRAINED = ("eagle", "medusa", "draft_model", "cross_tokenizer")


@pytest.mark.parametrize("kind", [*SECONDS, *TRAINED])
def test_whose_turn_was_skipped_for_rounds_catches_up(kind: str) -> None:
    target, right = target_of("llama"), 0
    second = Recorder(member_of(kind, target))
    cascade = Cascade([Often(), second])
    for prompt in PROMPTS:
        second.drafts.clear()
        result = decode(target, cascade, prompt, GREEDY, LENGTH)
        assert result.tokens == generated("llama", prompt, LENGTH)
        text = (*prompt, *result.tokens)
        for context, branches in second.drafts:
            assert context == text[: len(context)]
            hits = sum(text[len(context) : len(context) + len(branch)] == branch for branch in branches)
            assert hits or kind not in ("draft_model", "cross_tokenizer")  # which draft with the target itself
            right += hits
    assert right > 0
