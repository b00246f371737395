"""Predictions follow from the counts of real decoding and the costs, are stored, and are optional."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from layerskip import DraftPlan, PromptSet, Sampling, SpeculativeConfig, StopRule, Target
from layerskip.costs.cost_model import CostProfile
from layerskip.decoding.stats import Round
from layerskip.measure.measure import measure
from layerskip.scan.scan import Scan, Scanner
from layerskip.texts.continuations import Continuation, continue_prompts
from searches.predict import preparation
from searches.predict.preparation import Preparation, ScanSettings
from searches.predict.proposals import propose_lookups
from searches.predict.scan_predictor import ScanPredictor
from searches.space.search_space import SearchSpace
from tests.families import build

PROMPTS = PromptSet.of(["one two one two", "three four three four", "five six"])
THRESHOLD = StopRule("threshold", 0.1)
CHOICES = list(itertools.product(range(1, 5), (StopRule(), THRESHOLD)))


def _profile(layers: int) -> CostProfile:
    return CostProfile(20, 1.0, 0.1, (0.5,) * layers, (1.0,) * layers, 0.01, 0.3, tuple(8.0 + g for g in range(6)))


def _scanner(target: Target) -> Scanner:
    return Scanner(target, continue_prompts(target, PROMPTS, Sampling(), 8), Sampling(), depth=4)


def _predictor(target: Target, folder: Path) -> ScanPredictor:
    return ScanPredictor(_scanner(target), _profile(target.layers), {"layer_skip": CHOICES}, folder)


def _seconds(profile: CostProfile, rounds: Iterable[Round], each: float) -> float:
    """Return the seconds of rounds whose drafted tokens take ``each``."""
    return sum(r.drafted * each + (r.drafted > 0) * 0.3 + profile.verify_seconds[r.drafted] for r in rounds)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., ScanPredictor | None]:
    """Prepares a predictor."""
    monkeypatch.setattr("searches.predict.preparation.PROFILE_REPEATS", 2)

    def prepare(target: Target, **changes: Any) -> ScanPredictor | None:
        space = SearchSpace(target.layers, protect_first=0, protect_last=0, **changes)
        return Preparation(target, Sampling(), tmp_path).predictor(PROMPTS, 6, space, ScanSettings(), tmp_path / "scans", 0)

    return prepare


def test_predictions_have_the_lengths_and_rules_of_their_method(tiny_target: Target, tmp_path: Path) -> None:
    scanner, profile, mask = _scanner(tiny_target), _profile(tiny_target.layers), DraftPlan.of(tiny_target.layers, {1}, {1})
    both = ScanPredictor(scanner, profile, {"layer_skip": CHOICES[:1], "quantized": CHOICES}, tmp_path / "both")
    (found,) = both.predict([mask])
    assert (found.config.num_speculative_tokens, found.config.stop) == CHOICES[0]
    other = ScanPredictor(scanner, profile, {"quantized": CHOICES}, tmp_path / "other")
    (found,) = other.predict([mask])  # for a bound
    assert found.config.method == "layer_skip" and not other.can_predict(found.config)
    assert not any(both.can_predict(replace(found.config, **other)) for other in ({"draft_window": 512}, {"siblings": 1}))


def test_a_prediction_combines_the_counts_of_real_decoding_with_the_profile(tiny_target: Target, tmp_path: Path) -> None:
    predictor = _predictor(tiny_target, tmp_path)
    profile, mask = predictor.profile, DraftPlan.parse("mlp:1", tiny_target.layers)
    expected = {}
    for length, stop in CHOICES:
        config = SpeculativeConfig("layer_skip", length, mask=mask.format(), stop=stop)
        stats = measure(tiny_target, PROMPTS, config, max_new_tokens=8).stats
        each = profile.draft_seconds(mask) + (0.01 if stop.method != "length" else 0.0)
        tokens = sum(r.committed for r in stats.rounds)
        expected[config] = tokens * profile.verify_seconds[0] / _seconds(profile, stats.rounds, each)
        assert predictor.speedup(config) == pytest.approx(expected[config])
    (best,) = predictor.predict([mask])
    assert best.speedup == pytest.approx(max(expected.values()))
    assert best.speedup == pytest.approx(expected[best.config])
    assert all(predictor.can_predict(config) for config in expected)
    for other in ({"num_speculative_tokens": 5}, {"stop": StopRule("adaptive", 0.1)}):
        assert not predictor.can_predict(replace(best.config, **other))


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


def test_stored_predictions_are_not_repeated(tiny_target: Target, tmp_path: Path) -> None:
    masks = [DraftPlan.parse(text, tiny_target.layers) for text in ("mlp:0", "mlp:1", "layers:1")]
    predictor = _predictor(tiny_target, tmp_path)
    predicted, agreements = predictor.predict(masks[:2]), predictor.agreements(masks[:2])
    counts = tmp_path / "counts.jsonl"
    counts.write_bytes(counts.read_bytes() + b'["layers:1", {"agr')  # as a killed process may leave it
    again = _predictor(tiny_target, tmp_path)
    with mock.patch.object(Scanner, "scan", autospec=True, side_effect=Scanner.scan) as scan:
        assert again.predict(masks)[:2] == predicted
        assert again.agreements(masks[:2]) == agreements
    assert [call.args[1] for call in scan.call_args_list] == [masks[2:]]


@pytest.mark.parametrize("maximum", [100, 4])
def test_passes_have_as_many_rows_as_memory_allows(
    maximum: int,
    tiny_target: Target,
    prepared: Callable[..., ScanPredictor | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scan = Scanner.scan

    def scarce(self: Scanner, masks: Sequence[DraftPlan], *args: Any, **options: Any) -> list[Scan]:
        if self.max_rows > maximum:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return scan(self, masks, *args, **options)

    monkeypatch.setattr(Scanner, "scan", scarce)
    predictor = prepared(tiny_target)
    output = capsys.readouterr().out
    assert "out of memory with 256 rows in a pass; trying 128" in output
    if maximum == 100:
        assert predictor is not None and predictor._scanner.max_rows == 64
        assert predictor.predict([DraftPlan.parse("mlp:1", tiny_target.layers)])
    else:
        assert predictor is None
        assert "16 rows in a pass; nothing is scanned\n" in output


def test_a_model_that_cannot_be_scanned_has_no_predictor(
    prepared: Callable[..., ScanPredictor | None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Target, "encode", lambda self, prompt, field: [5, 6, 7])  # it has no tokenizer
    assert prepared(Target(build("gpt_neo"))) is None
    assert "GPTNeoForCausalLM: cannot be scanned" in capsys.readouterr().out
    ending = Target(build("llama", eos_token_id=list(range(64))))
    assert prepared(ending) is None
    assert "scan: every continuation ends at once; there is nothing to scan" in capsys.readouterr().out
    assert prepared(ending, methods=("none", "layer_skip"), ranges={"layer_skip": {"stop": ("adaptive",)}}) is None
    assert "scan: adaptive stop rules, the only ones of the space, are not predicted" in capsys.readouterr().out


def _continuation(length: int, new: int = 64) -> Continuation:
    return Continuation("", "", (5,) * (length - new // 2), (5,) * new, new)


def test_a_profile_is_measured_once_at_the_mean_context_of_all_tokens(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = mock.Mock(side_effect=lambda target, context, *_, **__: replace(_profile(3), context=context))
    monkeypatch.setattr(preparation, "profile_costs", timed)

    def context(*continuations: Continuation) -> int:
        return Preparation(tiny_target, Sampling(), tmp_path).cost_profile(continuations, 3).context

    for _ in range(2):
        assert context(_continuation(200), _continuation(300)) == 256
        assert context(_continuation(200), _continuation(2000, new=130)) == 1408
    assert [call.args[1] for call in timed.call_args_list] == [256, 1408]  # the second time, all are read from their files
