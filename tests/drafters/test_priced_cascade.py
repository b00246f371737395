"""Cascades with known costs: the contract, and which members are asked at all."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import pytest

from layerskip.config import AcceptRule, SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter, LateRead, VerifyOutput
from layerskip.decoding.stats import Round
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Cascade, PricedCascade
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import Eagle
from layerskip.drafters.registry import build_drafter
from layerskip.heads.readout import Readout
from layerskip.models.target import Target
from tests.accelerator import decode_static
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, SAMPLINGS, Recorder, generated, target_of
from tests.drafters.heads import eagle_head
from tests.drafters.members import LOOKUP, SKIP, Choosing, member_of
from tests.drafters.test_draft_model import noisy_copy
from tests.drafters.test_token_recycling import experienced_drafter


class Priced(Choosing):
    samplings = SAMPLINGS[1:2]

    def rounds(self, passes: int) -> tuple[dict[int, set[tuple[int, ...]]], list[Round], Counter[int | None]]:
        """Returns the contexts in which each member drafted, all rounds, and the number of rounds of each member.

        Decodes all prompts ``passes`` times.
        """
        target = target_of("llama")
        cascade = self.drafter(target)
        assert isinstance(cascade, PricedCascade)
        cascade.members = members = tuple(Recorder(member) for member in cascade.members)
        taken, observe = Counter[int | None](), cascade.observe

        def observed(verdict: Verdict) -> None:
            taken[cascade._drafted] += 1
            observe(verdict)

        cascade.observe = observed  # type: ignore[method-assign]
        rounds = [r for prompt in PROMPTS * passes for r in decode(target, cascade, prompt, GREEDY, LENGTH).stats.rounds]
        drafts = (member.drafts for member in members)
        return {n: {context for context, branches in each if branches} for n, each in enumerate(drafts)}, rounds, taken


class TestLookupThenTreesThatHaveToPay(Priced):
    trees = True

    def drafter(self, target: Target) -> Drafter:
        """The second member has decoded before, so that it has something to draft."""
        return PricedCascade([member_of("prompt_lookup", target), copy.deepcopy(experienced_drafter(target))], (1.25, 1.3))

    def test_some_drafts_are_taken_and_some_declined(self) -> None:
        drafted, rounds, _ = self.rounds(1)
        assert 0 < sum(found.drafted > 0 for found in rounds) < len(set().union(*drafted.values()))


class TestLookupThenLayerSkipThatHasToPay(Priced):
    """Also with drawn drafts: which member drafts is decided before anything is drawn."""

    samplings = Choosing.samplings

    def drafter(self, target: Target) -> Drafter:
        skip = SKIP | {"mask": "attention:0" if target.layers == 1 else SKIP["mask"]}
        members = [build_drafter(SpeculativeConfig.from_dict(fields), target) for fields in (LOOKUP, skip)]
        return PricedCascade(members, (1.02, 1.04), (0.0, 0.05))

    def test_the_second_member_drafts_some_of_the_remaining_rounds(self) -> None:
        drafted, rounds, _ = self.rounds(2)
        assert 0 < len(drafted[1]) < sum(not found.drafted for found in rounds)


class TestSureModelAndLookupThatHaveToPay(Priced):
    """The first of two models leaves rounds with a low first confidence to the second."""

    samplings = SAMPLINGS[:1]

    def drafter(self, target: Target) -> Drafter:
        sure, second = (
            DraftModel(noisy_copy(target), target.layers, 3, stop) for stop in (StopRule("threshold", 0.6), StopRule())
        )
        return PricedCascade([sure, member_of("prompt_lookup", target), second], (1.01, 1.02), (0.01, 0.0, 0.01))

    def test_another_member_drafts_if_the_first_is_provisional(self) -> None:
        drafted, _, taken = self.rounds(1)
        assert taken[0]
        assert taken[2]
        assert len(drafted[0]) > taken[0]


def test_without_draft_costs_a_model_is_asked_if_no_lookup_pays() -> None:
    target, asked, lost = target_of("llama"), 0, 0
    first, second = (Recorder(member_of(method, target)) for method in ("prompt_lookup", "layer_skip"))
    cascade = PricedCascade([first, second], (1.1, 1.2))
    for prompt in PROMPTS:
        for recorder in (first, second):
            recorder.drafts.clear()
        result = decode(target, watched := Recorder(cascade), prompt, GREEDY, LENGTH)
        assert result.tokens == generated("llama", prompt, LENGTH)
        theirs = dict(second.drafts)
        for context, branches in watched.drafts:
            assert branches == theirs[context] if context in theirs else branches  # without it a lookup was verified
        asked, lost = asked + len(theirs), lost + len(watched.drafts) - len(theirs)
    assert asked > 5
    assert lost > 5


def test_tokens_that_only_fill_up_a_tree_on_the_device_have_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass computes them like the others, so a tree of few likely tokens costs what a full one does."""
    target, head = target_of("llama"), eagle_head("llama")
    embeddings = target.model.get_input_embeddings()
    trees = Eagle(head, embeddings, Readout(target, head.tokens), 3, StopRule(), 3, 7, 0.2)
    cascade = PricedCascade([member_of("prompt_lookup", target), trees], (1.05, 1.1), (0.0, 0.02))
    computed, priced, drafted = list[int](), list[int](), list[int]()
    observe_logits, observe, verify_cost = cascade.observe_logits, cascade.observe, cascade._verify_cost

    def observed_logits(output: VerifyOutput) -> Sequence[LateRead]:
        computed.append(output.block.shape[0] - 1)
        return observe_logits(output)

    def observed(verdict: Verdict) -> None:
        drafted.append(len(verdict.drafted))
        with monkeypatch.context() as patch:
            patch.setattr(cascade, "_verify_cost", lambda size: priced.append(size) or verify_cost(size))
            observe(verdict)

    monkeypatch.setattr(cascade, "observe_logits", observed_logits)
    monkeypatch.setattr(cascade, "observe", observed)
    for prompt in PROMPTS:
        decode_static(target, cascade, prompt, GREEDY, LENGTH)
        computed[len(priced) :] = []  # of the round that ends the text
    assert priced == computed
    assert sum(few < size for few, size in zip(drafted, computed, strict=True)) > 0


def test_lossy_rules_use_the_cascade_without_costs() -> None:
    members = [SpeculativeConfig.from_dict(fields) for fields in (LOOKUP, SKIP)]
    costs = {"verify_cost": (1.1, 1.2), "draft_cost": (0.0, 0.1)}
    for rule, method in (("exact", PricedCascade), ("typical", Cascade)):
        config = SpeculativeConfig("cascade", members=tuple(members), accept=AcceptRule(rule), **costs)  # type: ignore[arg-type]
        assert type(build_drafter(config, target_of("llama"))) is method
