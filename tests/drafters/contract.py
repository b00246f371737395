"""The tests that every drafter's tests inherit: whatever it proposes, the output is the target's own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from layerskip.decoding.decode import DecodeResult, Stops, decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stats import DecodeStats
from layerskip.models.prefill import Prefill
from layerskip.models.target import Target
from tests.accelerator import DEVICE, decode_static
from tests.chi_square import assert_sequences_follow
from tests.drafters.recorder import Drafted, FirstDraft, Recorder
from tests.exhaustive import EXHAUSTIVE, representative
from tests.families import build
from tests.reference import processed_probs

GREEDY = Sampling()
SAMPLINGS = (
    Sampling(1.0),
    Sampling(0.7, top_k=3, repetition_penalty=1.3),
    Sampling(1.5, top_p=0.9, min_p=0.1),
)
LENGTH = 24
NEW_TOKENS = LENGTH if EXHAUSTIVE else 16  # of the contract's tests
_FEW = 100  # sequences, of whose distribution fewer samples show as much
VOCABULARY = 12  # so few that drafts are sometimes right
Tokens = tuple[int, ...]


def _prompts() -> list[Tokens]:
    """Random tokens; every other prompt repeats itself, so that a lookup finds something."""
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 4, 7, 5, 18, 6)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [tuple(row * 3 if index % 2 else row) for index, row in enumerate(rows)]


PROMPTS = _prompts()
FEW_PROMPTS = representative(PROMPTS[1:3], [PROMPTS[0], *PROMPTS[3:]])  # where the prompt matters less than the round
ONE_PROMPT = representative(PROMPTS[1:2], PROMPTS[2:3])  # where every round is compared with another computation of it


@functools.cache
def target_of(family: str) -> Target:
    """A tiny target whose sliding window, if it has one, is much shorter than prompt and output together."""
    # With this seed, a draft sometimes gets the next tokens right.
    return Target(build(family, 1, vocab_size=VOCABULARY, eos_token_id=None))


@functools.cache
def toy_target() -> Target:
    """A model of five tokens; token 1 ends a sequence."""
    return Target(build("llama", 14, vocab_size=5, num_hidden_layers=1, hidden_size=16, eos_token_id=1))


# After this prompt every drafter has drafts of two tokens with none, one and both accepted, and some that end the sequence.
TOY_PROMPT = (4, 2, 1, 3, 1, 1, 3)


def greedy_tokens(target: Target, prompt: Sequence[int], **options: Any) -> list[int]:
    """The new tokens of transformers' own greedy ``generate`` with further options."""
    ids = torch.tensor([prompt], device=DEVICE)
    output: Any = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)  # type: ignore[operator]
    tokens: list[int] = getattr(output, "sequences", output)[0, len(prompt) :].tolist()
    return tokens


@functools.cache
def generated(family: str, prompt: Tokens, length: int, penalty: float = 1.0) -> list[int]:
    """The new tokens of transformers' own greedy ``generate``."""
    return greedy_tokens(target_of(family), prompt, max_new_tokens=length, repetition_penalty=penalty, eos_token_id=None)


@functools.cache
def toy_law(toy: Target, sampling: Sampling, length: int, prompt: Tokens = TOY_PROMPT) -> dict[Tokens, float]:
    """The exact distribution of sampled outputs after a prompt: every continuation, computed without a cache."""
    law: dict[Tokens, float] = {}
    open_ones: dict[Tokens, float] = {(): 1.0}
    for position in range(length):
        batch = torch.tensor([[*prompt, *prefix] for prefix in open_ones], device=DEVICE)
        with torch.inference_mode():
            logits = toy.model(input_ids=batch, use_cache=False).logits[:, -1]
        grown: dict[Tokens, float] = {}
        for (prefix, reached), row in zip(open_ones.items(), logits, strict=True):
            probs = processed_probs([*prompt, *prefix], row, sampling).double()
            for token, probability in enumerate((probs / probs.sum()).tolist()):
                if probability > 0.0:
                    ended = token in toy.eos_ids or position + 1 == length
                    (law if ended else grown)[*prefix, token] = reached * probability
        open_ones = grown
    return law


PENALTIES = representative([("gemma3_text", 0.8)], [("llama", 1.5), ("llama", 0.8), ("gemma3_text", 1.5)])


class DrafterContract:
    """Inherited as ``class TestSomeDrafter(DrafterContract)`` with :meth:`drafter`, or by :func:`contract`."""

    drafts = True  # whether it proposes anything
    trees = False  # whether its drafts branch
    history_dependent = False  # whether drafts depend on the target's earlier logits, not on the context alone
    keeps_state = False  # whether it keeps state from prompt to prompt
    # Samplings whose outputs are compared with the exact law; plain decoding and one drafter of chains have all.
    samplings: Sequence[Sampling] = representative(SAMPLINGS[1:2], (SAMPLINGS[0], SAMPLINGS[2]))
    # Whether `make test` samples with it; `make lossless` also samples with drafters that verify like another one.
    samples_by_default = True

    def drafter(self, target: Target) -> Drafter:
        """A new drafter for ``target``, which is any target of this module."""
        raise NotImplementedError

    def decode(self, target: Target, prompt: Tokens, length: int = NEW_TOKENS, sampling: Sampling = GREEDY) -> DecodeResult:
        return decode(target, self.drafter(target), prompt, sampling, length)

    @pytest.mark.parametrize("family", representative(["gemma3_text"], ["llama"]))  # other tests compare the llama's
    def test_greedy_tokens_equal_those_of_generate(self, family: str) -> None:
        target, stats = target_of(family), []
        for prompt in PROMPTS:
            result = self.decode(target, prompt)
            assert result.tokens == generated(family, prompt, NEW_TOKENS)
            stats.append(result.stats)
        # Otherwise the state after a rejection, or after an accepted draft, would not have been tested.
        rounds = [round for round in DecodeStats.join(stats).rounds if round.drafted]
        assert any(round.accepted < round.drafted for round in rounds) == self.drafts
        whole = (round.accepted >= 2 if self.trees else round.accepted == round.drafted for round in rounds)
        assert any(whole) == self.drafts

    @pytest.mark.parametrize(("family", "penalty"), PENALTIES)
    def test_penalised_tokens_equal_those_of_generate(self, family: str, penalty: float) -> None:
        for prompt in FEW_PROMPTS:
            result = self.decode(target_of(family), prompt, sampling=Sampling(repetition_penalty=penalty))
            assert result.tokens == generated(family, prompt, NEW_TOKENS, penalty)

    def test_output_ends_at_the_first_of_several_end_tokens(self) -> None:
        """Every token of an output becomes an end token in turn; some of them are inside a draft."""
        family, inside = "gemma3_text", False
        target = target_of(family)
        for prompt in representative(PROMPTS[1:4], [PROMPTS[0], *PROMPTS[4:]]):
            plain = generated(family, prompt, NEW_TOKENS)
            for end in dict.fromkeys(plain):
                eos_ids = (end, plain[-1])
                drafter, stops = self.drafter(target), Stops(frozenset(eos_ids))
                result = decode(target, drafter, prompt, GREEDY, NEW_TOKENS, stops=stops)
                assert result.tokens == plain[: min(map(plain.index, eos_ids)) + 1]
                assert result.finish == "eos"
                assert 1 + sum(round.committed for round in result.stats.rounds) == len(result.tokens)
                # Tokens after the end do not count; a drafted end token is not followed by a token of the target.
                assert all(round.accepted <= round.committed for round in result.stats.rounds)
                inside |= any(round.accepted == round.committed for round in result.stats.rounds)
        assert inside == self.drafts

    def test_output_ends_at_its_limit(self) -> None:
        prompts = representative(PROMPTS[1:2], [PROMPTS[2], PROMPTS[0], PROMPTS[3]])
        for prompt, limit in itertools.product(prompts, range(1, 8)):
            target = target_of("llama")
            result = decode(target, Recorder(self.drafter(target)), prompt, GREEDY, limit)  # it checks the drafts' lengths
            assert result.tokens == generated("llama", prompt, NEW_TOKENS)[:limit]
            assert result.finish == "length"

    def test_one_drafter_serves_several_prompts(self) -> None:
        """It drafts for each as if it were the first, unless it keeps state; the tokens alone are right in any case."""
        target, stats = target_of("llama"), {}
        drafter = self.drafter(target)
        if self.keeps_state:  # measurements rely on it
            assert drafter.keeps_state
        prompts = representative(PROMPTS[1:4], [PROMPTS[0], *PROMPTS[4:]])
        pairs = list(zip(prompts, itertools.cycle((1.5, 1.0)), strict=False))  # every other one is penalised
        for prompt, penalty in (*pairs, *pairs[::-1]):
            result = decode(target, drafter, prompt, Sampling(repetition_penalty=penalty), NEW_TOKENS)
            assert result.tokens == generated("llama", prompt, NEW_TOKENS, penalty)
            assert stats.setdefault(prompt, result.stats) == result.stats or self.keeps_state

    def test_drafts_depend_on_the_context_alone(self) -> None:
        """A fresh drafter proposes the same, whatever was accepted or rejected before."""
        if self.history_dependent:
            pytest.skip("it learns from the target's earlier logits")
        target = target_of("llama")
        for prompt in ONE_PROMPT:
            recorder = Recorder(self.drafter(target))
            decode(target, recorder, prompt, GREEDY, LENGTH)
            for context, drafted in recorder.drafts:
                fresh = FirstDraft(self.drafter(target))
                with pytest.raises(Drafted):
                    decode(target, fresh, context[:-1], GREEDY, 8)
                ((start, expected),) = fresh.drafts
                shared = min(max(map(len, branches), default=0) for branches in (drafted, expected))
                assert (start, bool(drafted)) == (context, bool(expected))
                one, other = ([b for b in branches if len(b) <= shared] for branches in (drafted, expected))
                count = min(len(one), len(other))  # longer branches of one tree take the places of short ones
                assert one[:count] == other[:count]

    def test_state_lasts_until_it_is_reset(self) -> None:
        if not self.keeps_state:
            pytest.skip("it keeps no state")
        target = target_of("llama")
        drafter = self.drafter(target)
        drafter.reset_state()
        first, again = (decode(target, drafter, PROMPTS[2], GREEDY, NEW_TOKENS) for _ in range(2))
        assert again.tokens == first.tokens
        assert again.stats != first.stats
        assert len(again.stats.rounds) < len(first.stats.rounds) or not self.history_dependent
        drafter.reset_state()
        assert decode(target, drafter, PROMPTS[2], GREEDY, NEW_TOKENS).stats == first.stats

    @pytest.mark.parametrize("family", representative(["gemma3_text"], ["llama"]))
    def test_static_shapes_change_nothing(self, family: str) -> None:
        target = target_of(family)
        for prompt in ONE_PROMPT:
            result = decode_static(target, self.drafter(target), prompt, GREEDY, NEW_TOKENS)
            assert result.tokens == generated(family, prompt, NEW_TOKENS)
            assert result.stats == self.decode(target, prompt).stats

    def test_sampled_tokens_follow_the_exact_law(self) -> None:
        """Four tokens: one from the prefill, then a draft of up to two and a bonus token; many sequences end before."""
        if not (self.samples_by_default or EXHAUSTIVE):
            pytest.skip("make lossless samples with it")
        target, prompt = toy_target(), TOY_PROMPT
        drafter, prefill = self.drafter(target), Prefill.of(target, prompt)
        torch.manual_seed(0)
        for sampling in self.samplings:
            # Most samples share one prefill; every tenth has its own.
            law = toy_law(target, sampling, 4, prompt)
            prompts = (prefill if number % 10 else prompt for number in range(600 if len(law) > _FEW else 500))
            results = [decode(target, drafter, given, sampling, 4) for given in prompts]
            assert_sequences_follow((tuple(result.tokens) for result in results), law)
            rounds = DecodeStats.join(result.stats for result in results).rounds
            for accepted in (0, 1, 2):
                assert any(round.drafted >= 2 and round.accepted == accepted for round in rounds) == self.drafts
            assert any(round.accepted == round.committed for round in rounds) == self.drafts


def contract(
    drafter: Callable[[Target], Drafter], base: type[DrafterContract] = DrafterContract, **attributes: Any
) -> type[DrafterContract]:
    """The tests of a drafter with other attributes than the contract's, for a name that begins with ``Test``."""
    return type("TestDrafter", (base,), {"drafter": staticmethod(drafter)} | attributes)
