"""Predictions follow from the counts of real decoding and the costs, are stored, and are optional."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import PromptSet, Sampling, SkipMask, SpeculativeConfig, StopRule, Target
from layerskip.costs.cost_model import CostProfile
from layerskip.decoding.decode import decode
from layerskip.decoding.stats import Round
from layerskip.drafters.registry import build_drafter
from layerskip.measure.measure import measure
from layerskip.scan.replay import Counts, count
from layerskip.scan.scan import Scan, Scanner
from layerskip.texts.continuations import Continuation, continue_prompts
from searches.predict import preparation
from searches.predict.preparation import Preparation, ScanSettings
from searches.predict.proposals import propose_lookups
from searches.predict.scan_predictor import ContextCosts, DraftChoices, ScanPredictor, spread_contexts
from searches.space.search_space import SearchSpace
from tests.families import build

PROMPTS = PromptSet.of(["one two one two", "three four three four", "five six"])
THRESHOLD = StopRule("threshold", 0.1)
OTHERS = (StopRule("threshold", 0.15), StopRule("adaptive", 0.12, carry=False))
CHOICES = DraftChoices((1, 4), (StopRule(), THRESHOLD))


def _profile(layers: int) -> CostProfile:
    return CostProfile(20, 1.0, 0.1, (0.5,) * layers, (1.0,) * layers, 0.01, 0.3, tuple(8.0 + g for g in range(6)))


def _scanner(target: Target, runners: int = 0) -> Scanner:
    return Scanner(target, continue_prompts(target, PROMPTS, Sampling(), 8), Sampling(), depth=4, runners=runners)


def _predictor(target: Target, folder: Path) -> ScanPredictor:
    return ScanPredictor(_scanner(target), _profile(target.layers), CHOICES, folder)


def _seconds(profile: CostProfile, rounds: Iterable[Round], each: float) -> float:
    """Return the seconds of rounds whose drafted tokens take ``each``."""
    return sum(r.drafted * each + (r.drafted > 0) * 0.3 + profile.verify_seconds[r.drafted] for r in rounds)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Target], ScanPredictor | None]:
    """Prepares a predictor with a rough profile."""
    monkeypatch.setattr("searches.predict.preparation.PROFILE_REPEATS", 2)

    def prepare(target: Target) -> ScanPredictor | None:
        space = SearchSpace(target.layers, protect_first=0, protect_last=0)
        return Preparation(target, Sampling(), tmp_path).predictor(PROMPTS, 6, space, ScanSettings(), tmp_path / "scans", 0)

    return prepare


def test_a_prediction_combines_the_counts_of_real_decoding_with_the_profile(tiny_target: Target, tmp_path: Path) -> None:
    predictor = _predictor(tiny_target, tmp_path)
    profile = predictor.profile
    for text in ("mlp:1", "attention:0"):
        mask = SkipMask.parse(text, tiny_target.layers)
        expected = {}
        for length in range(1, 5):
            for stop in (*CHOICES.stops, *OTHERS):
                config = SpeculativeConfig("layer_skip", length, mask=text, stop=stop)
                stats = measure(tiny_target, PROMPTS, config, max_new_tokens=8).stats
                each = profile.draft_seconds(mask) + (0.01 if stop.method != "length" else 0.0)
                tokens = sum(r.committed for r in stats.rounds)
                expected[config] = tokens * profile.verify_seconds[0] / _seconds(profile, stats.rounds, each)
                assert predictor.speedup(config) == pytest.approx(expected[config])
        (best,) = predictor.predict([mask])
        assert best.speedup == pytest.approx(max(v for config, v in expected.items() if config.stop in CHOICES.stops))
        assert expected[best.config] == pytest.approx(best.speedup)
        assert all(predictor.can_predict(config) for config in expected)
        assert not predictor.can_predict(SpeculativeConfig("layer_skip", 5, mask=text))  # deeper than scans
        assert not predictor.can_predict(SpeculativeConfig("layer_skip", 2, mask=text, siblings=1))  # scans follow chains


def test_siblings_that_are_not_found_have_a_cost(tiny_target: Target, tmp_path: Path) -> None:
    scanner = _scanner(tiny_target, runners=1)
    profile = replace(_profile(tiny_target.layers), siblings_seconds=0.25)
    predictor = ScanPredictor(scanner, profile, DraftChoices((2, 2), siblings=(1,)), tmp_path)
    config = SpeculativeConfig("layer_skip", 3, mask="mlp:1", siblings=1, min_token_prob=1.0)
    stats = measure(tiny_target, PROMPTS, config, max_new_tokens=8).stats
    assert all(found.depth is None for found in stats.rounds)
    each = profile.draft_seconds(SkipMask.parse("mlp:1", tiny_target.layers)) + 0.25
    tokens = sum(found.committed for found in stats.rounds)
    expected = tokens * profile.verify_seconds[0] / _seconds(profile, stats.rounds, each)
    assert predictor.speedup(config) == pytest.approx(expected)
    (best,) = predictor.predict([SkipMask.parse("mlp:1", tiny_target.layers)])
    assert (best.config.num_speculative_tokens, best.config.siblings) == (2, 1)
    assert best.speedup == pytest.approx(predictor.speedup(best.config))


def test_lookups_are_predicted_from_the_text(tiny_target: Target, tmp_path: Path) -> None:
    predictor = _predictor(tiny_target, tmp_path)
    ranges = {"num_speculative_tokens": (2, 7), "prompt_lookup_min": (1, 2), "prompt_lookup_max": (1, 2)}
    space = SearchSpace(tiny_target.layers, protect_first=0, protect_last=0, ranges={"prompt_lookup": ranges})
    found = propose_lookups(predictor, space)
    assert len(found) == 3
    assert found == sorted(found, key=lambda prediction: -prediction.speedup)
    assert not predictor.can_predict(SpeculativeConfig("prompt_lookup", 7))  # its verification was not timed
    stats = measure(tiny_target, PROMPTS, found[0].config, max_new_tokens=8).stats
    seconds = sum(predictor.profile.verify_seconds[r.drafted] for r in stats.rounds)
    tokens = sum(r.committed for r in stats.rounds)
    assert found[0].speedup == pytest.approx(tokens * predictor.profile.verify_seconds[0] / seconds)


def test_stored_predictions_are_not_repeated(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = [SkipMask.parse(text, tiny_target.layers) for text in ("mlp:0", "mlp:1", "layers:1")]
    predictor = _predictor(tiny_target, tmp_path)
    predicted, agreements = predictor.predict(masks[:2]), predictor.agreements(masks[:2])
    counts = tmp_path / "counts.jsonl"
    counts.write_bytes(counts.read_bytes() + b'["layers:1", {"agr')  # as a killed process may leave it

    scanned: list[SkipMask] = []

    def recorded(self: Scanner, masks: Sequence[SkipMask], *args: Any, **options: Any) -> list[Scan]:
        scanned.extend(masks)
        return scan(self, masks, *args, **options)

    scan = Scanner.scan
    monkeypatch.setattr(Scanner, "scan", recorded)
    again = _predictor(tiny_target, tmp_path)
    assert again.predict(masks)[:2] == predicted
    assert again.agreements(masks[:2]) == agreements
    assert scanned == masks[2:]


def test_adaptive_stops_are_predicted_as_in_trials(tiny_target: Target, tmp_path: Path) -> None:
    """A trial's drafter has decoded other prompts before, here the same ones."""
    stop, config = StopRule("adaptive", 0.1, step=0.5, threshold_decay=0.5), SpeculativeConfig("layer_skip", 4, mask="mlp:1")
    scanner = _scanner(tiny_target)
    mask, drafter = SkipMask.parse("mlp:1", tiny_target.layers), build_drafter(replace(config, stop=stop), tiny_target)

    def counts() -> list[Counts]:
        texts = scanner.continuations
        return [count(decode(tiny_target, drafter, p.prompt, Sampling(), p.max_new_tokens).stats.rounds) for p in texts]

    first, second = counts(), counts()
    assert first != second
    among = ScanPredictor(scanner, _profile(3), DraftChoices((4, 4), (StopRule(), stop)), tmp_path / "among")
    among.predict([mask])
    ((_, kept),) = [json.loads(line) for line in (tmp_path / "among" / "counts.jsonl").read_text().splitlines()]
    (found,) = [counts for length, rule, _, counts in kept["counts"] if (length, rule) == (4, 1)]
    assert [Counts.from_list(each) for each in found] == second
    other = ScanPredictor(scanner, _profile(3), CHOICES, tmp_path / "other")
    assert other.speedup(replace(config, stop=stop)) == _profile(3).speedup(sum(second, Counts()), mask, stop)


def test_adaptive_stops_of_sampled_tokens_are_not_predicted(tiny_target: Target, tmp_path: Path) -> None:
    """Replays keep the threshold constant."""
    sampling = Sampling(temperature=1.0)
    scanner = Scanner(tiny_target, continue_prompts(tiny_target, PROMPTS, sampling, 8), sampling, depth=4)
    predictor = ScanPredictor(scanner, _profile(3), CHOICES, tmp_path)
    held = SpeculativeConfig("layer_skip", 4, mask="mlp:1", stop=THRESHOLD)
    adaptive = replace(held, stop=StopRule("adaptive", THRESHOLD.threshold))
    assert [predictor.can_predict(config) for config in (held, adaptive)] == [True, False]


@pytest.mark.parametrize("maximum", [100, 4])
def test_passes_have_as_many_rows_as_memory_allows(
    maximum: int,
    tiny_target: Target,
    prepared: Callable[[Target], ScanPredictor | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scan = Scanner.scan

    def scarce(self: Scanner, masks: Sequence[SkipMask], *args: Any, **options: Any) -> list[Scan]:
        if self.max_rows > maximum:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return scan(self, masks, *args, **options)

    monkeypatch.setattr(Scanner, "scan", scarce)
    predictor = prepared(tiny_target)
    output = capsys.readouterr().out
    assert "out of memory with 256 rows in a pass; trying 128" in output
    if maximum == 100:
        assert predictor is not None and predictor.max_rows == 64
        assert predictor.predict([SkipMask.parse("mlp:1", tiny_target.layers)])
    else:
        assert predictor is None
        assert "16 rows in a pass; nothing is scanned\n" in output


def test_a_model_that_cannot_be_scanned_has_no_predictor(
    prepared: Callable[[Target], ScanPredictor | None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Target, "encode", lambda self, prompt, field: [5, 6, 7])  # it has no tokenizer
    assert prepared(Target(build("gpt_neo"))) is None
    assert "GPTNeoForCausalLM: cannot be scanned" in capsys.readouterr().out


SKIPPED = SkipMask.parse("layers:0", 2)


def _continuation(length: int) -> Continuation:
    return Continuation("", "", (5,) * (length - 32), (5,) * 64, 64)


def _profile_at(context: int) -> CostProfile:
    """Attention and verification have a fixed cost and one per position."""
    each = context / 1000
    verify = tuple(4.0 + 3 * each + drafted for drafted in range(4))
    return CostProfile(context, 1.0, 0.5, (0.2 + each, 0.2 + each), (1.0, 1.0), 0.1, 0.25, verify)


@pytest.mark.parametrize(
    ("lengths", "contexts"),
    [
        ([100, 200, 900], [384]),  # short
        ([3000, 4000, 5900], [4288]),  # alike
        ([200, 8000], [192, 8000]),
        ([300, 2000, 8000], [320, 1984, 8000]),
        ([300, 7000, 8000], [320, 8000]),
    ],
)
def test_far_apart_contexts_are_timed_apart(lengths: list[int], contexts: list[int]) -> None:
    assert spread_contexts(lengths) == contexts


def test_a_speedup_sums_over_the_contexts_of_the_continuations() -> None:
    continuations = [_continuation(length) for length in (1000, 2500, 4000)]
    parts = [Counts(20, 40, 30, 50, (0, 0, 20)), Counts(30, 90, 5, 35, (0, 0, 0, 30)), Counts(10, 10, 8, 18, (0, 10))]
    costs = ContextCosts(replace(_profile_at(1000), others=(_profile_at(4000),)), continuations)

    def seconds(profile: CostProfile, counts: Counts) -> float:
        return profile.seconds(counts, SKIPPED, StopRule())

    drafting = plain = 0.0
    for context, counts in zip((1000, 2500, 4000), parts, strict=True):
        drafting += counts.drafted * (1.0 + 0.5 + 1.0 + 0.2 + context / 1000) + counts.rounds * 0.25
        drafting += sum(times * (4.0 + 3 * context / 1000 + g) for g, times in enumerate(counts.verified))
        plain += counts.tokens * (4.0 + 3 * context / 1000)
    assert costs.speedup(parts, seconds) == pytest.approx(plain / drafting)
    total = sum(parts, Counts())
    one = ContextCosts(_profile_at(1000), continuations)
    assert one.speedup(parts, seconds) == _profile_at(1000).speedup(total, SKIPPED, StopRule())
    assert one.average is one.profile


def test_a_profile_is_measured_at_the_contexts_of_the_prompts(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []

    def measured(target: Target, context: int, *_: Any, **options: Any) -> CostProfile:
        timed.append(context)
        return _profile_at(context)

    monkeypatch.setattr(preparation, "profile_costs", measured)

    def profile(*lengths: int) -> CostProfile:
        return Preparation(tiny_target, Sampling(), tmp_path).cost_profile([_continuation(each) for each in lengths], 3)

    for _ in range(2):
        assert profile(200, 300) == _profile_at(256)
        assert profile(192, 1984, 8000) == replace(_profile_at(192), others=(_profile_at(1984), _profile_at(8000)))
    assert timed == [256, 192, 1984, 8000]  # the second time, all are read from their files
    stored = [json.loads(file.read_text(encoding="utf-8"))["asked"] for file in (tmp_path / "profiles").glob("*.json")]
    assert sorted(asked["contexts"] for asked in stored) == [[192, 1984, 8000], [256]]
