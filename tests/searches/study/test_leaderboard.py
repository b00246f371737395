"""The leaderboard pools replicates, weighs prompts alike, and adds contenders with other drafters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from layerskip import PromptSet, SpeculativeConfig
from layerskip.measure.measurement import Sample
from searches.study.leaderboard import LeaderboardEntry, contenders, ranking
from tests.searches.known import Known, lookup, run_known


def test_a_prompt_weighs_no_more_if_it_was_decoded_more_often() -> None:
    def table(*speedups: float) -> dict[str, list[Any]]:
        names = [f"p{place}" for place in range(len(speedups))]
        seconds = [1 / speedup for speedup in speedups]
        rates = [10 * speedup for speedup in speedups]
        return {
            "prompt_id": names,
            "tokens_per_second": rates,
            "decode_seconds": seconds,
            "baseline_tokens_per_second": [10.0] * len(names),
        }

    once, often = LeaderboardEntry(lookup(4)), LeaderboardEntry(lookup(5))
    once.add(table(4.0, 1.0, 1.0))
    often.add(table(4.0, 1.0, 1.0))
    for _ in range(5):
        often.add(table(4.0))
    assert often.speedup == pytest.approx(once.speedup) == pytest.approx(3 / 2.25)


def test_the_best_of_another_drafter_and_the_first_of_the_leaders_contend_if_about_as_fast() -> None:
    recycling = SpeculativeConfig("token_recycling", 4)
    lookups = [lookup(length) for length in range(4, 9)]
    for speedup, count in ((1.45, 3), (1.2, 2)):
        bench = Known({lookup: 1.5 + place / 100 for place, lookup in enumerate(lookups)} | {recycling: speedup})
        study = run_known(bench, *lookups, recycling)
        configs = [entry.config for entry in contenders(study, 2)]
        assert configs == [*[*reversed(lookups[-2:]), recycling][:count], lookups[0]]


def test_a_lucky_leader_is_measured_again_and_falls_back() -> None:
    lucky, solid = lookup(4), lookup(5)

    class Lucky(Known):
        def compare(
            self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, repeats: int, seed: int, *_: object
        ) -> Iterator[dict[str, Sample]]:
            first = not any(config == lucky for config, _ in self.asked)
            self.speedups = {solid: 1.4, lucky: 1.6 if first or len(self.asked) < 5 else 1.0}
            return super().compare(configs, prompts, repeats, seed)

    bench = Lucky({})
    others = [lookup(length) for length in range(6, 12)]
    study = run_known(bench, lucky, solid, *others, remeasure=3, trials=14)
    leader = ranking(study)[0]
    assert leader.config == solid
    assert next(entry.complete for entry in ranking(study) if entry.config == lucky) >= 2
