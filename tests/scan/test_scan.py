"""Tests that a scan replays every round of the real decoder, on every family, in bounded memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stats import Round
from layerskip.decoding.stopping import confidence
from layerskip.draft_plan import DraftPlan
from layerskip.drafters.prompt_lookup import PromptLookup
from layerskip.drafters.registry import build_drafter
from layerskip.kernels.cpu import MOST_ROWS, has_kernels
from layerskip.models import packing
from layerskip.models.architecture import UnsupportedModel
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.prefill import Prefill
from layerskip.models.skip_view import cached_skip_view, decoding_view
from layerskip.models.target import Target
from layerskip.prompts import PromptSet
from layerskip.scan.replay import replay_lookup
from layerskip.scan.scan import Scanner
from layerskip.texts.continuations import Continuation, continue_prompts
from searches.predict.mask_search import drafting_with
from tests.accelerator import DEVICE
from tests.exhaustive import EXHAUSTIVE, representative
from tests.families import build
from tests.resources import peak_bytes

Rounds = list[list[Round]]
THRESHOLDS = (0.05, 0.1, 0.3)
STOPS = (StopRule(), *(StopRule("threshold", value) for value in THRESHOLDS))
GREEDY, PENALISED = Sampling(), Sampling(repetition_penalty=1.3)
FAMILIES = representative(
    ("deepseek_v3", "gemma3_text", "gpt2", "llama", "llama4_text"), ("cohere", "gemma2", "mistral", "mixtral", "phi")
)


def continuation_of(target: Target, number: int, prompt: Sequence[int], sampling: Sampling, new: int) -> Continuation:
    tokens = decode(target, NoDraft(), prompt, sampling, new, seed=number).tokens
    return Continuation(str(number), "test", tuple(prompt), tuple(tokens), new)


def _rounds(target: Target, continuations: Sequence[Continuation], config: SpeculativeConfig, sampling: Sampling) -> Rounds:
    drafter = build_drafter(config, target)
    found = []
    for continuation in continuations:
        out = decode(target, drafter, continuation.prompt, sampling, continuation.max_new_tokens)
        assert tuple(out.tokens) == continuation.tokens
        found.append(list(out.stats.rounds))
    return found


def random_mask(layers: int, source: random.Random, share: float) -> DraftPlan:
    flags = [tuple(source.random() < share for _ in range(layers)) for _ in range(2)]
    return DraftPlan(*flags)


@pytest.mark.parametrize(("family", "sampling"), [*((name, GREEDY) for name in FAMILIES), ("llama", PENALISED)])
def test_a_scan_replays_the_real_decoder(family: str, sampling: Sampling) -> None:
    """Prompts are longer than the windows of tests.families, and some continuations end early.

    ``LAYERSKIP_ALL_PROMPTS=1`` tests 20 masks with every draft length and stop rule instead of a few.
    """
    target = Target(build(family))
    source = random.Random(family)
    prompts = [[source.randrange(3, 64) for _ in range(length)] for length in (5, 13)]
    continuations = [continuation_of(target, i, prompt, sampling, 20) for i, prompt in enumerate(prompts)]
    scanner = Scanner(target, continuations, sampling, depth=8, max_rows=40)
    scanner.check()
    count = 21 if EXHAUSTIVE else 3  # the empty mask, and random ones
    found = (random_mask(target.layers, source, share) for share in itertools.cycle((0.1, 0.3, 0.5)))
    masks = [DraftPlan.none(target.layers)]
    while len(masks) < count:
        masks = list(dict.fromkeys([*masks, next(found)]))
    outcomes, cut = set[tuple[bool, bool]](), 0
    for number, scan in enumerate(scanner.scan(masks, floor=source.choice((0.0, THRESHOLDS[0])))):
        pairs = [(1, STOPS[0]), (8, STOPS[0]), *((source.randint(2, 8), stop) for stop in STOPS[1:])]
        for length, stop in itertools.product(range(1, 9), STOPS) if EXHAUSTIVE else pairs[number % 2 :: 2]:
            config = SpeculativeConfig("layer_skip", length, mask=scan.mask.format(), stop=stop)
            rounds = _rounds(target, continuations, config, sampling)
            assert scanner.rounds(scan, length, stop) == rounds, config.label()
            outcomes |= {(r.accepted > 0, r.accepted < r.drafted) for some in rounds for r in some if r.drafted}
            cut += rounds != scanner.rounds(scan, length, STOPS[0])
    assert {(True, False), (False, True)} <= outcomes  # fully accepted drafts, and rejected ones
    assert cut, "no stop rule ended a draft"


@pytest.mark.skipif(DEVICE != "cpu" or not has_kernels(), reason="needs a C++ compiler and AVX2 or AVX-512")
def test_a_scan_replays_drafts_of_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the kernels take at once, and plans that share a pass with others or with none."""
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))
    target = Target(build("llama"), pack_weights=True)
    source = random.Random(0)
    prompts = [[source.randrange(3, 64) for _ in range(length)] for length in (5, 13)]
    continuations = [continuation_of(target, i, prompt, GREEDY, 24) for i, prompt in enumerate(prompts)]
    scanner = Scanner(target, continuations, GREEDY, depth=6, max_rows=100)
    texts = "int4", "int8", "layers:1", "int4;layers:1=skip", "int4;attention:0=int8;mlp:2=keep;head=keep", "mlp:0", ""
    assert sum(each.starts for each in continuations) > MOST_ROWS
    rejected = 0
    for scan in scanner.scan([DraftPlan.parse(text, target.layers) for text in texts], floor=THRESHOLDS[0]):
        for length, stop in ((1, STOPS[0]), (6, STOPS[0]), (4, STOPS[2])):
            rounds = _rounds(target, continuations, drafting_with(scan.mask, length, stop), GREEDY)
            assert scanner.rounds(scan, length, stop) == rounds, (scan.mask.format(), length, stop)
            rejected += sum(r.accepted < r.drafted for some in rounds for r in some) * bool(scan.mask.formats)
    assert rejected


@pytest.mark.skipif(DEVICE != "cpu" or not has_kernels(), reason="needs a C++ compiler and AVX2 or AVX-512")
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("gemma3_text", torch.bfloat16)])
def test_drafts_of_fewer_bits_are_scanned_bit_by_bit(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against drafts of one row at a time, on caches that verification has filled by passes of several sizes."""
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))
    target = Target(build(family).to(dtype).float(), pack_weights=True)
    continuations = [continuation_of(target, number, [9, 8, 7, number + 5], GREEDY, 40) for number in range(2)]
    scanner = Scanner(target, continuations, GREEDY, depth=3)
    assert sum(each.starts for each in continuations) > MOST_ROWS
    for text in ("int4", "int8;head=int4;attention:0=int4;mlp:1=keep;mlp:0=skip;layers:2=skip"):
        (scan,) = scanner.scan([DraftPlan.parse(text, target.layers)], floor=0.0)
        for continuation, trace in zip(continuations, scan.traces, strict=True):
            for start in range(0, continuation.starts - 2, 9):
                expected = _confidences(target, scan.mask, continuation, start, 3)
                found = trace.confidence[start, : continuation.limit(start)].tolist()
                assert found == expected[: len(found)], (text, start)


@torch.inference_mode()
def _confidences(target: Target, plan: DraftPlan, continuation: Continuation, start: int, length: int) -> list[float]:
    """Drafts after a token of a continuation, on a cache that passes over one to three tokens have filled."""
    known, end = torch.tensor([*continuation.prompt, *continuation.tokens]), len(continuation.prompt) + start
    cache, found = KVCache(target.layers, end + length), list[float]()
    Prefill.of(target, continuation.prompt).restore(cache)
    while cache.length < end:
        block = known[cache.length : min(cache.length + 1 + start % 3, end)]
        forward(decoding_view(target.model), block, cache, 1)
        cache.length += len(block)
    token = known[end : end + 1]
    for _ in range(length):
        logits = forward(cached_skip_view(target.model, plan), token, cache, 1)
        cache.length, token = cache.length + 1, logits.argmax(-1)
        found.append(float(confidence(logits)))
    return found


def test_a_continuation_that_ends_inside_a_draft_is_replayed(tiny_target: Target) -> None:
    plain = continuation_of(tiny_target, 0, [5, 6, 7, 8], GREEDY, 12)
    for end in range(2, 9, 2):
        eos = frozenset({plain.tokens[end]})
        tokens = plain.tokens[: plain.tokens.index(plain.tokens[end]) + 1]
        continuation = Continuation("0", "test", plain.prompt, tokens, 12)
        scanner = Scanner(tiny_target, [continuation], GREEDY, depth=5)
        for mask in (DraftPlan.none(tiny_target.layers), DraftPlan.parse("mlp:1", tiny_target.layers)):
            (scan,) = scanner.scan([mask], floor=THRESHOLDS[0])
            for stop in STOPS:
                drafter = build_drafter(SpeculativeConfig("layer_skip", 5, mask=mask.format(), stop=stop), tiny_target)
                out = decode(tiny_target, drafter, continuation.prompt, GREEDY, 12, stops=Stops(eos))
                assert scanner.rounds(scan, 5, stop) == [list(out.stats.rounds)]


def test_a_prompt_lookup_is_replayed_without_a_scan(tiny_target: Target) -> None:
    """Its drafts depend on the text alone."""
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 8, 9, 9], [3, 4]]
    continuations = [continuation_of(tiny_target, i, prompt, GREEDY, 60) for i, prompt in enumerate(prompts)]
    for low, high, match, length in ((1, 3, "last", 4), (2, 2, "first", 8), (1, 1, "last", 20), (1, 2, "first", 3)):
        config = SpeculativeConfig("prompt_lookup", length, prompt_lookup_min=low, prompt_lookup_max=high, match=match)
        drafter = PromptLookup(low, high, match, length)
        found = [replay_lookup(continuation, drafter) for continuation in continuations]
        assert found == _rounds(tiny_target, continuations, config, GREEDY)
        assert sum(r.accepted for rounds in found for r in rounds) > 0


def test_what_was_not_scanned_is_refused(tiny_target: Target) -> None:
    continuations = [continuation_of(tiny_target, 0, [5, 6, 7], GREEDY, 8)]
    scanner, sampled = (Scanner(tiny_target, continuations, sampling, depth=3) for sampling in (GREEDY, Sampling(1.0)))
    (scan,), (other,) = (one.scan([DraftPlan.parse("mlp:1", tiny_target.layers)], floor=1.0) for one in (scanner, sampled))
    for length, stop, message in (
        *((4, StopRule(), "depth"), (2, StopRule("adaptive", 0.1), "adaptive"), (3, StopRule("threshold", 0.001), "0.001")),
    ):
        with pytest.raises(ValueError, match=message):
            scanner.rounds(scan, length, stop)
    with pytest.raises(ValueError, match="greedy"):
        sampled.rounds(other, 2, StopRule())


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt_neo", {}, "GPTNeoForCausalLM: cannot be scanned"),  # it derives its own mask from a square one
        ("falcon", {"alibi": True}, r"cannot be scanned: its attention mask has the shape \(1, 4, "),  # a mask per head
    ],
)
def test_a_family_without_independent_rows_is_refused(family: str, changes: dict[str, bool], reason: str) -> None:
    target = Target(build(family, **changes))
    continuations = [continuation_of(target, 0, [5, 6, 7], GREEDY, 8)]
    with pytest.raises(UnsupportedModel, match=reason):
        Scanner(target, continuations, GREEDY).check()


def test_smollm2_is_replayed(smollm2: Target) -> None:
    """Random masks with draft lengths and stop rules, each pair on the next tuning prompt.

    ``LAYERSKIP_ALL_PROMPTS=1`` tests 20 masks, each with all 32 pairs of length and stop rule, and so on all tuning prompts.
    """
    count, new = (20, 16) if EXHAUSTIVE else (1, 8)
    tune = PromptSet.packaged().split()[0]
    if not EXHAUSTIVE:
        tune = PromptSet((min(tune, key=lambda item: len(item.content())),))
    continuations = list(continue_prompts(smollm2, tune, GREEDY, new))
    scanner = Scanner(smollm2, continuations, GREEDY, depth=8)
    source = random.Random(0)
    masks = [random_mask(smollm2.layers, source, source.choice((0.03, 0.08, 0.2))) for _ in range(count)]
    stops = [StopRule(), *(StopRule("threshold", value) for value in (0.2, 0.5, 0.8))]
    pairs = list(itertools.product(range(1, 9), stops))
    source.shuffle(pairs)
    turns = itertools.cycle(pairs)
    prompts = itertools.cycle(range(len(continuations)))
    for scan in scanner.scan(masks, floor=0.2):
        for length, stop in itertools.islice(turns, len(pairs) if EXHAUSTIVE else 1):
            index = next(prompts)
            config = SpeculativeConfig("layer_skip", length, mask=scan.mask.format(), stop=stop)
            real = _rounds(smollm2, [continuations[index]], config, GREEDY)[0]
            assert scanner.rounds(scan, length, stop)[index] == real, config.label()


def test_the_memory_of_a_scan_grows_with_rows_and_not_with_masks(tiny_target: Target) -> None:
    """The peak of all tensors, without the target's states of the continuations."""
    continuations = [continuation_of(tiny_target, i, [9, 8, 7, i], GREEDY, 10) for i in range(6)]
    source = random.Random(2)
    masks = [random_mask(tiny_target.layers, source, 0.5) for _ in range(16)]

    def peak(count: int, rows: int) -> int:
        scanner = Scanner(tiny_target, continuations, GREEDY, depth=4, max_rows=rows)
        return peak_bytes(lambda: scanner.scan(masks[:count]))

    few, many, wide = peak(8, 16), peak(16, 16), peak(16, 128)
    assert many <= 1.05 * few
    assert 4 * many < wide <= 8 * many


def test_the_targets_states_stay_within_their_budget(tiny_target: Target) -> None:
    """Continuations beyond the budget are left out, and the results of the others stay the same."""
    continuations = [continuation_of(tiny_target, i, [9, 8, 7], GREEDY, 10) for i in range(8)]
    mask = DraftPlan.parse("mlp:1", tiny_target.layers)
    whole = Scanner(tiny_target, continuations, GREEDY, depth=4)
    budget = sum(text.nbytes for text in whole._texts.texts) // 2
    assert whole.continuations == tuple(continuations)
    part = Scanner(tiny_target, continuations, GREEDY, depth=4, max_bytes=budget)
    assert part.continuations == tuple(continuations[:4])
    assert sum(text.nbytes for text in part._texts.texts) <= budget
    (scan,), (whole_scan,) = part.scan([mask]), whole.scan([mask])
    assert part.counts(scan, 3, StopRule()) == whole.counts(whole_scan, 3, StopRule())[:4]
    smallest = Scanner(tiny_target, continuations, GREEDY, depth=4, max_bytes=1)
    assert len(smallest.continuations) == 1  # the first one is never left out
