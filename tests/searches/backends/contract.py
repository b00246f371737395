"""The tests that every back end inherits: paired rows, unchanged outputs, plain descriptions, and nothing left behind."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from layerskip import PromptSet, SpeculativeConfig, Target, generate
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Measurement, Sample
from searches.backends.backend import BASELINE, CANDIDATE, Backend, Comparison

TOKENS = 12
TASK = Task(max_new_tokens=TOKENS)
PROMPTS = PromptSet.of(["one two one two one two", "three four", "five six seven five six seven"])
LOOKUP = SpeculativeConfig("prompt_lookup", 3, prompt_lookup_min=1, prompt_lookup_max=2)
SHORTER = SpeculativeConfig("prompt_lookup", 2, prompt_lookup_min=1, prompt_lookup_max=2)


def children(of: int = 0) -> set[int]:
    """The processes that this one, or another one, started and that still exist, those that they started included."""
    return {process.pid for process in psutil.Process(of or os.getpid()).children(recursive=True)}


def measure(backend: Backend, config: SpeculativeConfig, prompts: PromptSet = PROMPTS, task: Task = TASK) -> Measurement:
    """Measure one configuration against plain decoding."""
    return Measurement.of(backend.compare(Comparison({CANDIDATE: config}, prompts, task)), BASELINE, CANDIDATE)


class BackendContract:
    """Tests of a back end. The fixture ``make`` of a subclass returns a function that makes one for a target in float32."""

    config = LOOKUP
    other = SHORTER

    @pytest.fixture
    def backend(self, make: Any, tiny_target: Target) -> Iterator[Backend]:
        before, threads = children(), set(threading.enumerate())
        made = make(tiny_target)
        yield made
        made.close()
        made.close()
        assert children() <= before
        assert set(threading.enumerate()) <= threads

    def test_rows_pair_unchanged_outputs_and_can_be_stored(self, backend: Backend, tiny_target: Target) -> None:
        rows = list(backend.compare(Comparison({CANDIDATE: self.config}, PROMPTS, TASK)))
        for row, item in zip(rows, PROMPTS, strict=True):
            assert row.keys() == {BASELINE, CANDIDATE}
            expected = generate(tiny_target, item.messages(), max_new_tokens=TOKENS)
            for sample in row.values():
                assert (sample.prompt_id, sample.category) == (item.id, item.category)
                assert 0 < sample.decoded_tokens < sample.tokens == len(expected.tokens)
                assert sample.lossless.compared == 1
                assert sample.prefill_seconds > 0 and sample.decode_seconds > 0
                assert sum(each.committed for each in sample.stats.rounds) == sample.decoded_tokens
                assert all(each.accepted <= each.drafted for each in sample.stats.rounds)
                assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample
            assert row[BASELINE].stats.drafted == 0
            assert len(row[BASELINE].stats.rounds) == row[BASELINE].decoded_tokens
        measured = Measurement.of(rows, BASELINE, CANDIDATE)
        assert measured.lossless.verdict == "exact"
        assert measured.stats.drafted > 0 and measured.stats.mean_acceptance_length > 1
        metrics = measured.to_dict()
        assert metrics["speedup"] > 0 and math.isfinite(metrics["speedup"])
        json.dumps([metrics, backend.metrics()], allow_nan=False)
        assert all(isinstance(value, float) and math.isfinite(value) for value in backend.metrics().values())

    def test_several_configurations_share_rows_until_one_is_left_out(self, backend: Backend) -> None:
        without: set[str] = set()
        found = []
        for row in backend.compare(Comparison({"one": self.config, "other": self.other}, PROMPTS, TASK, without=without)):
            found.append(row)
            without.add("other")
        assert all(row.keys() >= {BASELINE, "one"} for row in found)
        assert found[0].keys() == {BASELINE, "one", "other"}
        assert all(row["one"].lossless.verdict == "exact" for row in found)

    def test_a_comparison_that_stops_early_and_a_close_can_be_followed_by_another(self, backend: Backend) -> None:
        rows = iter(backend.compare(Comparison({CANDIDATE: self.config}, PROMPTS, TASK)))
        next(rows)
        del rows
        assert len(measure(backend, self.other).candidate) == len(PROMPTS)
        backend.close()
        assert measure(backend, self.config).lossless.verdict == "exact"

    def test_a_conversation_is_one_sample(self, backend: Backend, tmp_path: Path) -> None:
        file = tmp_path / "turns.jsonl"
        file.write_text(json.dumps({"turns": ["one two one two", "and three"]}), encoding="utf-8")
        (row,) = backend.compare(Comparison({CANDIDATE: self.config}, PromptSet.load(file), TASK))
        for sample in row.values():
            assert TOKENS < sample.tokens <= 2 * TOKENS
            assert (sample.lossless.compared, sample.lossless.verdict) == (2, "exact")

    def test_descriptions_are_plain_and_repeat_and_refusals_are_one_line(
        self, backend: Backend, make: Any, tiny_target: Target
    ) -> None:
        described = backend.describe()
        assert json.loads(json.dumps(described)) == described
        assert make(tiny_target).describe() == described
        assert backend.name
        for method in ("none", self.config.method, self.other.method):
            assert backend.supports(method) is None
        reason = backend.supports("astrology")
        assert reason and "\n" not in reason
