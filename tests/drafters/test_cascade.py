"""Cascades without costs: the contract, which member is asked, and what each observes."""

from __future__ import annotations

import copy

import pytest
import torch

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, VerifyOutput
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Cascade
from layerskip.drafters.cross_tokenizer import CrossTokenizer
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.registry import build_drafter
from layerskip.models.cache import KVCache
from layerskip.models.target import Target
from tests.accelerator import DEVICE
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, SAMPLINGS, DrafterContract, contract, generated, target_of
from tests.drafters.members import LOOKUP, SECONDS, SKIP, Choosing, Member, member_of
from tests.drafters.recorder import Recorder
from tests.drafters.test_cross_tokenizer import other_letters
from tests.drafters.test_draft_model import noisy_copy
from tests.drafters.test_token_recycling import experienced_drafter
from tests.families import build


def _skip(target: Target) -> dict[str, object]:
    return SKIP | {"mask": "attention:0" if target.layers == 1 else SKIP["mask"]}


def _cascade(target: Target, second: dict[str, object]) -> Drafter:
    return build_drafter(SpeculativeConfig.from_dict({"method": "cascade", "members": [LOOKUP, second]}), target)


TestLookupThenLayerSkip = contract(lambda target: _cascade(target, _skip(target)), Choosing)
# The second member has decoded before, so that it has something to draft.
TestLookupThenTrees = contract(
    lambda target: Cascade([member_of("prompt_lookup", target), copy.deepcopy(experienced_drafter(target))]),
    trees=True,
    history_dependent=True,
    keeps_state=True,
)
# The second member observes passes for which the first has drafted.
TestLookupThenWindow = contract(
    lambda target: Cascade([member_of("prompt_lookup", target), member_of("lookahead", target)]),
    Choosing,
    samples_by_default=False,
    trees=True,
    samplings=SAMPLINGS[1:2],
)


def _lookup_then_model(target: Target) -> Drafter:
    """The second member's cache lags whenever the first has drafted."""
    model = build("llama", 1, vocab_size=target.vocabulary, num_hidden_layers=1)
    return Cascade([member_of("prompt_lookup", target), DraftModel(model, 1, 3, StopRule())])


TestLookupThenDraftModel = contract(_lookup_then_model, Choosing, samples_by_default=False, samplings=SAMPLINGS[1:2])


SURE, LESS_SURE = StopRule("threshold", 0.6), StopRule("threshold", 0.3)  # for models, and for weaker drafters


class SureFirst(DrafterContract):
    """The first member leaves a round to the second if a stop rule ends its draft after the first token, drawn or not."""

    samplings = SAMPLINGS[:1]

    def test_both_members_draft_rounds(self) -> None:
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


TestSureModelThenLookup = contract(
    lambda target: Cascade([DraftModel(noisy_copy(target), target.layers, 3, SURE), member_of("prompt_lookup", target)]),
    SureFirst,
    samplings=DrafterContract.samplings,
)


class TestSureSiblingsThenModel(SureFirst):
    trees = True

    def drafter(self, target: Target) -> Drafter:
        skip = _skip(target) | {"siblings": 1, "stop": SURE.to_dict()}
        sure = build_drafter(SpeculativeConfig.from_dict(skip), target)
        return Cascade([sure, DraftModel(noisy_copy(target), target.layers, 2, SURE)])

    def test_drafts_depend_on_the_context_alone(self) -> None:
        pytest.skip("they also depend on the limit: no stop rule is applied to the only token of a draft")


def _sure_speller(target: Target) -> Drafter:
    model, translation = other_letters(target)
    sure = CrossTokenizer(model, target.layers, model.config.vocab_size, translation, 3, LESS_SURE)
    return Cascade([sure, member_of("prompt_lookup", target)])


TestSureSpellerThenLookup = contract(_sure_speller, SureFirst, samples_by_default=False)


@pytest.mark.parametrize("proposes", [True, False])
def test_a_provisional_draft_is_taken_if_no_other_member_has_one(proposes: bool) -> None:
    """Plain passes of the model give its confidence in its first token; a draft of its own then has one token."""
    target = target_of("llama")
    model, unsure = noisy_copy(target), 0
    for prompt in PROMPTS:
        second = Member()
        second.proposes = proposes
        rounds = Recorder(Cascade([DraftModel(model, target.layers, 3, SURE), second]))
        assert decode(target, rounds, prompt, GREEDY, LENGTH).tokens == generated("llama", prompt, LENGTH)
        for context, drafted in rounds.drafts:
            with torch.no_grad():
                chances = model(torch.tensor([context], device=DEVICE)).logits[0, -1].softmax(-1)
            if float(chances.max()) < SURE.threshold and len(context) < len(prompt) + LENGTH - 2:
                assert drafted == [(1,) if proposes else (int(chances.argmax()),)]
                unsure += 1
            else:
                assert drafted[0] == (int(chances.argmax()),)
        assert ("observe" in second.calls) == proposes
    assert unsure


def test_the_first_member_with_a_proposal_drafts_and_all_observe_the_logits() -> None:
    first, second = Member(), Member()
    cascade = Cascade([first, second])
    last = torch.tensor([1])
    context, output = Context([1], last), VerifyOutput(last, torch.zeros(1, 3))
    cascade.start([1], KVCache(1, 4), None)  # type: ignore[arg-type]
    for proposals in ((True, True), (False, True), (False, False)):
        first.proposes, second.proposes = proposals
        assert cascade.draft(context, 4).tokens.shape[0] == any(proposals)
        cascade.observe(Verdict((1,), 0, 2, last))
        cascade.observe_logits(output)
    assert first.calls == [
        "start",
        *("draft", "observe", "observe_logits"),
        *("draft", "observe_logits"),
        *("draft", "observe_logits"),
    ]
    assert second.calls == ["start", "observe_logits", *("draft", "observe", "observe_logits"), *("draft", "observe_logits")]


def test_a_member_that_was_never_asked_keeps_the_text() -> None:
    target, first = target_of("llama"), Member()
    cascade = Cascade([first, member_of("retrieval", target)])
    first_run = decode(target, cascade, PROMPTS[2], GREEDY, LENGTH)
    first.proposes = False
    again = decode(target, cascade, PROMPTS[2], GREEDY, LENGTH)
    fresh = decode(target, member_of("retrieval", target), PROMPTS[2], GREEDY, LENGTH)
    assert first_run.tokens == again.tokens == fresh.tokens == generated("llama", PROMPTS[2], LENGTH)
    assert len(again.stats.rounds) < len(fresh.stats.rounds)
    assert again.stats.rounds[0].accepted > 0  # it can only know this from the earlier prompt


class Often(Member):
    """Drafts in two of three rounds."""

    def draft(self, context: Context, limit: int) -> Draft:
        self.proposes = self.calls.count("draft") % 3 < 2
        return super().draft(context, limit)


TRAINED = ("eagle", "medusa", "draft_model", "cross_tokenizer")


@pytest.mark.parametrize("method", [*SECONDS, *TRAINED])
def test_a_member_that_was_skipped_for_rounds_catches_up(method: str) -> None:
    target, right = target_of("llama"), 0
    second = Recorder(member_of(method, target))
    cascade = Cascade([Often(), second])
    for prompt in PROMPTS:
        second.drafts.clear()
        result = decode(target, cascade, prompt, GREEDY, LENGTH)
        assert result.tokens == generated("llama", prompt, LENGTH)
        text = (*prompt, *result.tokens)
        for context, branches in second.drafts:
            assert context == text[: len(context)]
            hits = sum(text[len(context) : len(context) + len(branch)] == branch for branch in branches)
            assert hits or method not in ("draft_model", "cross_tokenizer")  # these draft with the target itself
            right += hits
    assert right > 0
