"""Plain decoding, the baseline: the contract, rounds of one token each, and passes that are launched ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from layerskip.config import SpeculativeConfig
from layerskip.decoding import decode as loop
from layerskip.decoding.decode import Stops
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stats import Round
from layerskip.drafters.registry import build_drafter
from layerskip.models.target import Target
from tests.accelerator import decode_static
from tests.drafters.contract import GREEDY, PROMPTS, DrafterContract, target_of

PROMPT = PROMPTS[2]


class TestNoDraft(DrafterContract):
    drafts = False

    def drafter(self, target: Target) -> Drafter:
        return build_drafter(SpeculativeConfig(), target)

    @pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(0.8, 5, 0.9, 0.02, 1.2)], ids=str)
    def test_launching_ahead_changes_neither_tokens_nor_rounds(self, sampling: Sampling) -> None:
        """Wherever the output ends, and with the same random numbers."""
        target, drafter = target_of("llama"), self.drafter(target_of("llama"))
        result = decode_static(target, drafter, PROMPT, sampling, 10, seed=3, static=False)
        whole = result.tokens
        assert len(set(whole)) > 2
        assert result.stats.rounds == (Round(0, 0, 1),) * 9
        for length in (1, 2, 5, 10):

            def stops(tokens: list[int], length: int = length) -> bool:
                return len(tokens) == len(PROMPT) + length

            for ending in (Stops(frozenset({whole[length - 1]})), Stops(criterion=stops)):
                plain, ahead = (
                    decode_static(target, drafter, PROMPT, sampling, 10, seed=3, static=static, stops=ending)
                    for static in (False, True)
                )
                assert plain == ahead

    def test_a_pass_is_launched_before_the_token_before_it_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        events: list[str] = []
        run, begin = loop.forward, loop.begin_reading

        def logged_pass(*args: Any, **options: Any) -> Tensor:
            events.append("pass")
            return run(*args, **options)

        def logged_read(tensor: Tensor) -> Callable[[], Any]:
            read = begin(tensor)
            return lambda: (events.append("read"), read())[1]

        monkeypatch.setattr(loop, "forward", logged_pass)
        monkeypatch.setattr(loop, "begin_reading", logged_read)
        target = target_of("llama")
        decode_static(target, self.drafter(target), PROMPT, GREEDY, 5, stops=Stops(frozenset()))
        # The first round's pass, and then always the next one; none after the last token.
        assert events == ["pass", *("pass", "read") * 3, "read"]
