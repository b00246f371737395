"""Schedules of draft lengths: planted costs whose best lengths are known, and stand-ins that follow the schedule."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from layerskip import Export, PromptSet, SpeculativeConfig, load_target
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.measure.losslessness import Divergence, Losslessness
from layerskip.measure.measurement import Measurement, Request, Sample
from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.backends.backend import BASELINE, BackendError, Comparison
from searches.backends.selection import exported_backend
from searches.backends.served import ServedBackend
from searches.results import ResultLog
from searches.schedule import Loads, Search, _speedup, as_ranges, worth_trying
from tests.searches.backends.processes import STANDIN
from tests.searches.conftest import Launch

LENGTHS = (1, 3, 5, 7)
COPIED, TOKENS = 24, 40  # tokens of a prompt that drafts cover, and all
RUNS = (1, 5)  # tokens that drafts get right, in turn
PROMPTS = PromptSet.of([f"prompt {place}" for place in range(8)])
HELD_OUT = PromptSet.of([f"held-out {place}" for place in range(8)])


def speedup(length: int, slope: float) -> float:
    """The true speedup of a length, where each drafted token adds ``slope`` steps to a round."""
    rounds = len(drafts(length))
    return TOKENS / (TOKENS - COPIED + rounds * (1 + slope * length))


def drafts(length: int) -> list[Round]:
    """The rounds that decode the copied tokens."""
    turn = [Round(length, min(length, run), min(length, run) + 1) for run in RUNS]
    return turn * (COPIED // sum(each.committed for each in turn)) if length else [Round(0, 0, 1)] * COPIED


@dataclass(eq=False)
class Planted(ServedBackend):
    """An engine whose cost of a drafted token depends on the number of requests, and may differ on held-out prompts."""

    target: Any = None
    slopes: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    changed: Collection[int] = ()  # numbers of requests at which drafting changes outputs
    burden: float = 1.0  # how many times as long an engine with a schedule takes where it does not draft
    first: float = 0.0  # seconds that each drafted token adds to the first token
    broken: Collection[int] = ()  # draft lengths with which the engine does not start
    name = "planted"
    asked: list[tuple[int, int]] = field(default_factory=list)

    def arguments(self, config: SpeculativeConfig, port: int) -> list[str]:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        return {}

    def compare(self, asked: Comparison) -> Iterator[dict[str, Sample]]:
        concurrency = asked.workload.concurrency
        for name, config in asked.configs.items():
            if config.method != "none" and config.num_speculative_tokens in self.broken:
                raise BackendError("planted: no memory", name=name)
        for item in asked.prompts:
            slopes = self.held_out if item in HELD_OUT.items and self.held_out else self.slopes
            row = {BASELINE: self._planted(item, 0, 0.0, concurrency, False)}
            for name, config in asked.configs.items():
                length = config.num_speculative_tokens if config.method != "none" else 0
                for first, last, scheduled in self.schedule if length else ():
                    length = scheduled if first <= concurrency <= last else length
                row[name] = self._planted(item, length, slopes[concurrency], concurrency, config.method != "none")
                self.asked.append((length, concurrency))
            yield row

    def _planted(self, item: Any, length: int, slope: float, concurrency: int, is_drafting: bool) -> Sample:
        rounds = (*drafts(length), *[Round(0, 0, 1)] * (TOKENS - COPIED))
        seconds, first = TOKENS / speedup(length, slope), 1.0 + self.first * length
        seconds *= self.burden if self.schedule and is_drafting and not length else 1.0
        different = (Divergence(item.id, 0, 9.0, 0.1),) if length and concurrency in self.changed else ()
        return Sample(
            item.id,
            item.category,
            TOKENS + 1,
            TOKENS,
            first,
            seconds,
            0,
            DecodeStats(rounds),
            Losslessness(1, different),
            requests=(Request(concurrency, TOKENS + 1, TOKENS, first, seconds),),
        )


def search(backend: Planted, goal: str = "tpot", limit: float | None = None, lengths: tuple[int, ...] = LENGTHS) -> Search:
    loads = Loads(tuple(backend.slopes), goal, limit)
    return Search(backend, SpeculativeConfig("prompt_lookup", 7), loads, lengths, TOKENS, 0, ResultLog(None))


SLOPES = {1: 0.02, 4: 0.5, 16: 2.0}


@pytest.mark.parametrize("goal", ["tpot", "throughput", "p95_tpot"])
def test_each_number_of_requests_gets_the_length_that_is_truly_fastest(goal: str) -> None:
    found = search(backend := Planted(slopes=SLOPES), goal)
    cells = found.tune(PROMPTS, predict=False)
    for cell in cells:
        true = speedup(cell.num_speculative_tokens, SLOPES[cell.concurrency])
        assert goal == "throughput" or cell.speedup[0] == pytest.approx(true)
        assert cell.predicted is None or goal == "throughput" or cell.predicted == pytest.approx(true)
    confirmed = found.confirm(cells, HELD_OUT, 1)
    best = {at: max((0, *LENGTHS), key=lambda k: (speedup(k, slope), -k)) for at, slope in SLOPES.items()}
    assert confirmed.lengths == best == {1: 5, 4: 1, 16: 0}
    assert confirmed.ranges == [[1, 2, 5], [3, 8, 1], [9, 16, 0]]
    for cell in confirmed.cells["schedule"]:
        for name, row in confirmed.cells.items():
            rival = next(other for other in row if other.concurrency == cell.concurrency)
            assert name == "schedule" or rival.speedup[0] <= cell.speedup[0] + 1e-9
        assert cell.speedup[0] >= 1 and cell.noise == 0
    assert {at for length, at in backend.asked if length == 3} == {*SLOPES}


def test_lengths_that_cannot_be_the_fastest_are_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    cells = search(backend := Planted(slopes={1: 0.02})).tune(PROMPTS, predict=True)
    assert {cell.num_speculative_tokens for cell in cells} == {5, 7}
    assert (1, 1) not in backend.asked
    assert "cannot be the fastest by what 7 shows: 1, 3" in capsys.readouterr().out
    assert worth_trying({1: {1: 0.9, 3: 0.97, 5: 0.5}}) == [3]  # near no drafting
    assert worth_trying({1: {1: 2.0, 3: 2.5, 7: 3.0}}) == [7]


def test_a_schedule_that_loses_or_changes_the_output_on_held_out_prompts_is_off_there() -> None:
    found = search(Planted(slopes={1: 0.02, 4: 0.02}, held_out={1: 0.02, 4: 9.0}))
    confirmed = found.confirm(found.tune(PROMPTS, predict=True), HELD_OUT, 1)
    assert confirmed.lengths == {1: 5, 4: 0}
    found = search(Planted(slopes={1: 0.02, 4: 0.02}, changed=[1]))
    assert found.confirm(found.tune(PROMPTS, predict=True), HELD_OUT, 1).lengths == {1: 0, 4: 5}


@pytest.mark.parametrize(
    ("slopes", "lengths"), [({1: 0.02, 4: 2.0}, {1: 0, 4: 0}), ({1: 0.01, 4: 0.02, 16: 0.68}, {1: 5, 4: 5, 16: 5})]
)
def test_a_schedule_is_not_the_result_where_its_engine_is_slower_over_all(
    slopes: dict[int, float], lengths: dict[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """As vLLM on a CPU, the engine is slower than one without drafting where its schedule says 0, or 1."""
    found = search(Planted(slopes=slopes, burden=9.0), lengths=(5,))
    confirmed = found.confirm(found.tune(PROMPTS, predict=False), HELD_OUT, 1)
    assert confirmed.lengths == lengths and confirmed.ranges == []
    assert confirmed.name == ("always 5" if any(lengths.values()) else "off")
    assert [cell.num_speculative_tokens for cell in confirmed.row] == [length for length in lengths.values() if length]
    if not any(lengths.values()):
        assert "no drafting is faster than the schedule" in capsys.readouterr().out


def test_a_length_that_the_engine_cannot_run_costs_itself_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = search(Planted(slopes={1: 0.02, 4: 2.0}, broken=[7, 1]))
    confirmed = found.confirm(found.tune(PROMPTS, predict=False), HELD_OUT, 1)
    assert confirmed.lengths == {1: 5, 4: 0}
    assert confirmed.cells.keys() == {"always 3", "always 5", "schedule"}
    assert "tune: length 7 is left out: planted: no memory" in capsys.readouterr().out
    found = search(Planted(slopes={1: 0.02}, broken=LENGTHS))
    assert found.confirm(found.tune(PROMPTS, predict=True), HELD_OUT, 1).lengths == {1: 0}


def test_among_lengths_within_a_limit_of_latency_throughput_decides() -> None:
    # Plain decoding takes a second a token, so that only drafting is within the limit.
    found = search(Planted(slopes={1: 0.02, 4: 0.5}), "p95_tpot", 0.9)
    confirmed = found.confirm(found.tune(PROMPTS, predict=False), HELD_OUT, 1)
    assert confirmed.lengths == {1: 5, 4: 1}
    # Drafting delays the first token, within the limit, and throughput is what counts: on held-out prompts, too.
    found = search(Planted(slopes={1: 0.02}, first=0.1), "p95_ttft", 1.6)
    assert found.confirm(found.tune(PROMPTS, predict=False), HELD_OUT, 1).lengths == {1: 5}
    found = search(Planted(slopes={1: 0.02}, first=0.1), "p95_ttft", 1.4)
    assert found.confirm(found.tune(PROMPTS, predict=False), HELD_OUT, 1).lengths == {1: 3}
    found = search(Planted(slopes={1: 9.0}), "p95_tpot", 2.0)
    assert found.confirm(found.tune(PROMPTS, predict=False), HELD_OUT, 1).lengths == {1: 0}


@pytest.mark.parametrize(
    ("lengths", "ranges"),
    [
        ({1: 7}, [[1, 1, 7]]),
        ({1: 7, 4: 3, 16: 0}, [[1, 2, 7], [3, 8, 3], [9, 16, 0]]),
        ({2: 3, 3: 3, 32: 1}, [[1, 9, 3], [10, 32, 1]]),
        ({1: 5, 2: 0}, [[1, 1, 5], [2, 2, 0]]),
    ],
)
def test_ranges_meet_and_hold_their_numbers(lengths: dict[int, int], ranges: list[list[int]]) -> None:
    assert as_ranges(lengths) == ranges
    by_count = [length for first, last, length in ranges for _ in range(first, last + 1)]
    assert all(by_count[count - 1] == length for count, length in lengths.items())


def test_repeats_of_a_prompt_do_not_narrow_the_interval_of_a_percentile() -> None:
    backend = Planted(slopes={1: 0.0})
    slopes = (0.0, 0.1, 0.2, 0.3, 0.5, 0.9)
    pairs = [
        (backend._planted(item, 0, 0.0, 1, False), backend._planted(item, 5, slope, 1, True))
        for item, slope in zip(PROMPTS.items, slopes, strict=False)
    ]
    once, often = (Measurement(*(tuple(side) for side in zip(*found, strict=True))) for found in (pairs, pairs * 9))
    # Percentiles interpolate between neighbours, which differ a little if each value is there nine times.
    first, second = (_speedup(measured, "tpot_p95") for measured in (once, often))
    assert second[1:] == pytest.approx(first[1:], rel=0.06) and first[2] > first[0] * 1.2


@pytest.mark.system
def test_the_program_exports_a_schedule_that_an_engine_follows(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"number {place}"}) for place in range(12)), encoding="utf-8")
    command = shlex.join([*STANDIN, "--port", "{port}", "--pause", "0.01", "--crowded", "0.09"])
    command += " --speculative-config {speculative_config}"
    options = [
        "target=local",
        f"target.path={tiny_folder}",
        "backend=server",
        f'backend.command="{command}"',
        "lengths=[2,4]",
    ]
    options += ["prompts=jsonl", f"prompts.path={prompts}", "workload.concurrency=[1,4]", "measure.max_new_tokens=12"]
    done = launch("schedule", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs" / "schedule"
    record = json.loads((folder / "schedule.json").read_text(encoding="utf-8"))
    assert record["lengths"] == {"1": 4, "4": 0}
    assert "num_speculative_tokens by requests in flight: 1 to 2: 4; from 3: off" in done.stdout
    scheduled = {at: record["held_out"]["schedule"][f"at_{at}"] for at in (1, 4)}
    # With four in flight, the first and the last requests begin with fewer beside them.
    assert scheduled[1]["mean_acceptance_length"] > 2 > 1.5 > scheduled[4]["mean_acceptance_length"]
    export = json.loads((folder / "best.json").read_text(encoding="utf-8"))
    words = export["engines"]["vllm"]["command"]
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative["num_speculative_tokens_per_batch_size"] == [[1, 2, 4], [3, 4, 0]]
    assert any("1 to 2 requests: 4" in note for note in export["engines"]["llama_cpp"]["differs"])
    assert not list((tmp_path / "outputs").glob("schedule-*.jsonl")) and (folder / "schedule.png").stat().st_size > 1000
    client = MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()], "tags.role = 'schedule'")
    history = client.get_metric_history(run.info.run_id, "held_out_schedule_speedup")
    speedups = {at: pytest.approx(cell["speedup"]) for at, cell in scheduled.items()}
    assert {point.step: point.value for point in history} == speedups
    assert record["held_out"]["schedule"]["geometric_mean"] == pytest.approx(
        math.sqrt(scheduled[1]["speedup"] * scheduled[4]["speedup"])
    )
    assert export["evidence"]["speedup"] == pytest.approx(scheduled[1]["speedup"])
    assert export["evidence"]["losslessness"]["verdict"] == "exact"
    # A verification serves the same schedule.
    config = compose_config("verify", [f"export={folder / 'best.json'}", *options[2:4]])
    loaded = Export.load(folder / "best.json")
    backend, workload = exported_backend(config, loaded, load_target(str(tiny_folder)))
    assert workload.concurrency == 1
    words = backend.arguments(loaded.config, 1)
    asked = json.loads(words[words.index("--speculative-config") + 1])
    assert asked["num_speculative_tokens_per_batch_size"] == [[1, 2, 4], [3, 4, 0]]
    config = compose_config("verify", [f"export={folder / 'best.json'}", *options[2:4], "backend.schedule=[[1,1,2]]"])
    with pytest.raises(InputError, match=r"^backend.schedule: the export was measured with \[\[1, 2, 4\]"):
        exported_backend(config, loaded, load_target(str(tiny_folder)))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("workload.concurrency=[0]", "workload.concurrency: 0 is not a whole number of at least 1"),
        ("workload.concurrency=[64]", "workload.concurrency: 64 requests need as many prompts in each half"),
        ("workload.concurrency=[1,a]", "workload.concurrency: 'a' is not a whole number of at least 1"),
        ("workload.goal=speed", "workload.goal: 'speed' is not one of tpot"),
        ("workload.limit_seconds=1", "workload.limit_seconds: is a limit for p95_tpot and p95_ttft, not for tpot"),
        ("lengths=[]", "lengths: is empty"),
        ("measure.prompts=0", "measure.prompts: 0 is not a whole number of at least 1"),
        ("backend.schedule=[[1,4,3]]", "backend.schedule: is what this program finds"),
        ("sampling=nucleus", "sampling: outputs are compared greedily"),
        ("backend=layerskip", "backend: takes no schedule"),
    ],
)
def test_bad_settings_are_refused_by_name(
    override: str, line: str, tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    done = launch("schedule", "target=local", f"target.path={tiny_folder}", override, cwd=tmp_path)
    assert done.returncode == 2 and f"error: {line}" in done.stderr, done.stderr
    assert not (tmp_path / "outputs").exists() or not any((tmp_path / "outputs").iterdir())
