"""A scan against the real decoder, which it claims to replay: every round of it, on every family."""

from __future__ import annotations

import random

import pytest

import layerskip
from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decode import decode
from layerskip.drafters.build import build_drafter
from layerskip.mask import SkipMask
from layerskip.passages import Passage
from layerskip.sampling import Sampling
from layerskip.scan import Scanner
from layerskip.target import Target
from tests.families import build

STOPS = (StopRule(), StopRule("threshold", 0.2), StopRule("threshold", 0.05), StopRule("adaptive", 0.1))
NEW = 24
Rounds = list[list[tuple[int, int, int]]]


def _passages(target: Target, prompts: list[list[int]], sampling: Sampling = Sampling()) -> list[Passage]:
    found = []
    for index, prompt in enumerate(prompts):
        out = layerskip.generate(target, prompt, sampling=sampling, max_new_tokens=NEW, seed=index)
        found.append(Passage(str(index), "test", tuple(prompt), tuple(out.tokens), NEW))
    return found


def _decoded(target: Target, passages: list[Passage], config: SpeculativeConfig, sampling: Sampling) -> Rounds:
    drafter = build_drafter(config, target)
    found = []
    for passage in passages:
        out = decode(target, drafter, list(passage.prompt), sampling, passage.max_new_tokens)
        assert tuple(out.tokens) == passage.tokens
        found.append([(r.drafted, r.accepted, r.committed) for r in out.stats.rounds])
    return found


def _random_mask(layers: int, source: random.Random) -> SkipMask:
    share = source.choice((0.1, 0.3))
    return SkipMask(*(tuple(source.random() < share for _ in range(layers)) for _ in range(2)))


FAMILIES = [
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral",
    "phi",
    "gpt2",
    "gpt_neox",
    "olmo2",
    "cohere",
    "mixtral",
    "stablelm",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scan_replays_the_real_decoder(family: str) -> None:
    target = Target(build(family))
    source = random.Random(family)
    prompts = [[source.randrange(3, 64) for _ in range(length)] for length in (5, 13, 9)]
    passages = _passages(target, prompts)
    scanner = Scanner(target, passages, Sampling(), depth=8, max_rows=40)
    masks = [_random_mask(target.layers, source) for _ in range(4)]
    for mask, scan in zip(masks, scanner.scan(masks), strict=True):
        for length in (1, 3, 8):
            for stop in STOPS:
                config = SpeculativeConfig("layer_skip", length, mask=mask.format(), stop=stop)
                expected = _decoded(target, passages, config, Sampling())
                assert scanner.rounds(scan, length, stop) == expected, config.label()
