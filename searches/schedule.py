"""The draft length by number of requests in flight, for an engine that serves several at once.

Usage: ``python -m searches.schedule [config=outputs/<study>/best.json] [workload.concurrency=[1,4,16]] [lengths=[1,3,5,7]]``

The longest draft is measured first at every number of requests. Its acceptance by position and its cost predict the
shorter ones, and those that cannot be the fastest at any number are left out. The fastest length at each number, or no
drafting, makes the schedule. It is measured on held-out prompts beside every fixed length that was tried, and drafting is
switched off where it loses there. If a fixed length, or an engine without drafting, is faster over all numbers of requests,
that is the result. An engine of its own serves each length, next to plain decoding. An interrupted run resumes.

The export holds the schedule; ``searches.export`` prints the command that starts an engine with it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from scipy.stats import fisher_exact

from layerskip import Export, Measurement, PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.config import methods
from layerskip.export import attachment_digests
from layerskip.files import digest, write_json
from layerskip.measure.measurement import MIN_RESAMPLED, Sample, check_output
from layerskip.models.environment import environment
from searches.app.application import run
from searches.app.checks import InputError, check_flag, check_list, check_number, check_seed, check_whole
from searches.app.targets import command_line
from searches.backends.backend import BASELINE, CANDIDATE, Backend, BackendError, Workload
from searches.backends.running_engine import request_metrics
from searches.backends.selection import backend_alone, closing, described
from searches.backends.served import ServedBackend
from searches.progress import say
from searches.report.tables import Row, as_markdown, conditions, with_interval
from searches.results import ResultLog, record_header
from searches.study.bench import ModelBench, resumed_rows
from searches.study.plan import check_prompts
from searches.tracking.names import METRICS
from searches.tracking.tracker import Tracker

GOALS = ("tpot", "throughput", "p95_tpot", "p95_ttft")
"""What is compared: decoding time per token, tokens per second with the prefill, or the 95th percentile of a latency."""
_SCHEDULE, _OFF = "schedule", "off"
_AGAIN = "again"  # plain decoding once more, whose differing outputs are the noise of the engine
_TIE = 0.01  # share of speed that a shorter draft may cost
_CHANCE = 0.05  # probability below which more changed outputs are not by chance
_CLOSE = 0.05  # share by which a length may miss the best prediction and still be measured
_RESAMPLES = 2000


@dataclass(frozen=True)
class Loads:
    """The requests in flight that a schedule is for; see ``workload`` in ``conf/schedule.yaml``."""

    concurrency: tuple[int, ...]
    goal: str
    limit_seconds: float | None

    def __post_init__(self) -> None:
        check_list("workload.goal", [self.goal], GOALS)
        if self.limit_seconds is not None:
            check_number("workload.limit_seconds", self.limit_seconds)
            if self.percentile is None:
                raise InputError(f"workload.limit_seconds: is a limit for p95_tpot and p95_ttft, not for {self.goal}")

    @property
    def percentile(self) -> str | None:
        """The metric of requests that the goal is, or None."""
        return f"{self.goal[4:]}_p95" if self.goal.startswith("p95_") else None

    def workload(self, concurrency: int) -> Workload:
        """Return the load with a number of requests, whose speedups are those of the goal."""
        return Workload(concurrency, "throughput" if self.goal == "throughput" else "decoding")


@dataclass(frozen=True)
class Cell:
    """A draft length at one number of requests, against plain decoding."""

    concurrency: int
    num_speculative_tokens: int
    speedup: tuple[float, float, float]  # of the goal, above 1 if better than plain decoding, with its interval of 95 %
    measurement: Mapping[str, Any]  # ``Measurement.to_dict``, whose speedup is that of decoding or of throughput
    metrics: Mapping[str, float]  # of :func:`~searches.backends.running_engine.request_metrics`
    noise: int | None = None  # outputs in which plain decoding, measured again, differs from itself, without near-ties
    predicted: float | None = None  # the speedup that was expected

    @property
    def keeps_output(self) -> bool:
        """Whether not significantly more outputs changed than those of plain decoding do by themselves."""
        checked, noise = self.measurement["losslessness"], self.noise or 0
        if not noise:
            return not checked["different"]
        counts = [[changed, max(0, checked["compared"] - changed)] for changed in (checked["different"], noise)]
        return float(fisher_exact(counts, alternative="greater").pvalue) >= _CHANCE

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, with the interval as ``speedup_low`` and ``speedup_high``."""
        own = {name: value for name, value in asdict(self).items() if name not in ("measurement", "speedup")}
        shown = {name: self.measurement[name] for name in ("prompts", "mean_acceptance_length", "losslessness")}
        return own | shown | dict(zip(("speedup", "speedup_low", "speedup_high"), self.speedup, strict=True))

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], loads: Loads, concurrency: int, length: int) -> Cell:
        """Judge the rows of a comparison."""
        measured, again = (Measurement.of(rows, BASELINE, name) for name in (CANDIDATE, _AGAIN))
        speedup, metrics = _speedup(measured, loads.percentile), request_metrics(measured)
        noise = again.lossless.to_dict()["different"] if again.candidate else None
        return cls(concurrency, length, speedup, measured.to_dict(), metrics, noise)


def _speedup(measured: Measurement, percentile: str | None) -> tuple[float, float, float]:
    """Return the speedup with its interval; of a latency's percentile by the bootstrap over prompts."""
    if percentile is None:
        return measured.speedup, *measured.interval()

    def ratio(pairs: Measurement) -> float:
        found = request_metrics(pairs)
        return found[f"{BASELINE}_{percentile}"] / found[percentile]

    by_prompt: dict[str, list[tuple[Sample, Sample]]] = {}  # a prompt counts with all its repeats
    for pair in zip(measured.baseline, measured.candidate, strict=True):
        by_prompt.setdefault(pair[0].prompt_id, []).append(pair)
    prompts, random, ratios = list(by_prompt.values()), np.random.default_rng(0), list[float]()
    for _ in range(_RESAMPLES if len(prompts) >= MIN_RESAMPLED else 0):
        chosen = [pair for place in random.integers(len(prompts), size=len(prompts)) for pair in prompts[place]]
        ratios.append(ratio(Measurement(*(tuple(side) for side in zip(*chosen, strict=True)))))
    low, high = np.quantile(ratios, [0.025, 0.975]) if ratios else (0.0, math.inf)
    return ratio(measured), float(low), float(high)


def predicted(cell: Cell, measured: Measurement, length: int) -> float:
    """Return the expected speedup of a draft length below that of a measured cell.

    Copied texts that one long draft covers take several short ones, each with the acceptance of its positions. The cost of
    a round beyond a step of plain decoding is taken to grow evenly with the draft.
    """
    drafted = [each for each in measured.stats.rounds if each.drafted]
    tokens, with_drafts = sum(each.committed for each in measured.stats.rounds), sum(each.committed for each in drafted)
    if not drafted:
        return cell.speedup[0]
    cost = (tokens / cell.speedup[0] - (tokens - with_drafts)) / len(drafted)
    accepted = sum(min(each.accepted, length) for each in drafted) / len(drafted)
    share = length / cell.num_speculative_tokens
    return tokens / (tokens - with_drafts + with_drafts / (1 + accepted) * (1 + (cost - 1) * share))


def worth_trying(speedups_by_load: Mapping[int, Mapping[int, float]]) -> list[int]:
    """Return the lengths that may be the fastest at some number of requests, given speedups by number and length."""
    found = set[int]()
    for speedups in speedups_by_load.values():
        best = max(1.0, *speedups.values())
        found |= {length for length, speedup in speedups.items() if speedup >= best * (1 - _CLOSE)}
    return sorted(found)


def fastest(cells: Sequence[Cell], loads: Loads) -> int:
    """Return the draft length for one number of requests; 0 if none is faster than plain decoding beyond doubt.

    With a limit, throughput decides between all that are within it, plain decoding included.
    """
    metric, limit = loads.percentile, loads.limit_seconds
    if metric is not None and limit is not None and cells:
        rates = {cell.num_speculative_tokens: cell.metrics["throughput"] for cell in cells if cell.metrics[metric] <= limit}
        plain = cells[0].metrics
        rates |= {0: plain[f"{BASELINE}_throughput"]} if plain[f"{BASELINE}_{metric}"] <= limit else {}
        if rates:
            return max(sorted(rates), key=lambda length: rates[length])
    faster = [cell for cell in cells if cell.speedup[1] > 1]
    enough = max((cell.speedup[0] for cell in faster), default=1.0) * (1 - _TIE)
    return min((cell.num_speculative_tokens for cell in faster if cell.speedup[0] >= enough), default=0)


def as_ranges(lengths: Mapping[int, int]) -> list[list[int]]:
    """Return lengths by number of requests as vLLM's ``[[first, last, length], ...]``.

    Between two numbers, the geometric mean parts them; beyond the last one, its length stays.
    """
    found, numbers, first = list[list[int]](), sorted(lengths), 1
    for place, number in enumerate(numbers):
        last = number if place + 1 == len(numbers) else max(number, math.isqrt(number * numbers[place + 1]))
        if found and found[-1][2] == lengths[number]:
            found[-1][1] = last
        else:
            found.append([first, last, lengths[number]])
        first = last + 1
    return found


@dataclass(frozen=True)
class Confirmed:
    """The result on held-out prompts: what was measured of each contender, by its name and the number of requests.

    ``lengths`` are those of the result, by number of requests, without those that lost. ``name`` is that of the contender
    that has them.
    """

    lengths: Mapping[int, int]
    cells: Mapping[str, Sequence[Cell]]
    name: str

    @property
    def row(self) -> Sequence[Cell]:
        """What was measured of the result; empty if it does not draft."""
        return self.cells.get(self.name, ())

    @property
    def ranges(self) -> list[list[int]]:
        """The schedule in vLLM's form; empty if one length, or no drafting, is for all numbers of requests."""
        return as_ranges(self.lengths) if len(set(self.lengths.values())) > 1 else []


@dataclass(frozen=True)
class Search:
    """What a schedule is measured with: a drafter on an engine, its loads and prompts, and the log of an interrupted run."""

    backend: ServedBackend
    config: SpeculativeConfig
    loads: Loads
    lengths: Sequence[int]
    max_new_tokens: int
    seed: int
    log: ResultLog
    on_cell: Callable[[str, Cell], object] = lambda name, cell: None

    def of_length(self, length: int) -> SpeculativeConfig:
        """Return the configuration that drafts so many tokens."""
        return replace(self.config, num_speculative_tokens=length) if length else SpeculativeConfig()

    def tune(self, prompts: PromptSet, predict: bool) -> list[Cell]:
        """Measure the lengths that may be the fastest at some number of requests, the longest first."""
        cells, predictions, chosen = list[Cell](), dict[int, dict[int, float]](), sorted(self.lengths, reverse=True)
        while chosen and not cells:
            longest = chosen.pop(0)
            for cell, measured in self._measured(self.backend, longest, prompts, "tune"):
                cells.append(cell)
                expected = {length: predicted(cell, measured, length) for length in chosen}
                predictions[cell.concurrency] = expected | {longest: cell.speedup[0]}
        if cells and predict:
            worth = worth_trying(predictions)
            if left := sorted({*chosen} - {*worth}):
                shown = ", ".join(map(str, left))
                say(f"not measured, because they cannot be the fastest by what {longest} shows: {shown}")
            chosen = [length for length in worth if length != longest]
        for length in sorted(chosen):
            for cell, _ in self._measured(self.backend, length, prompts, "tune"):
                expected_speedup = predictions[cell.concurrency][length] if self.loads.percentile is None else None
                cells.append(replace(cell, predicted=expected_speedup))
        return cells

    def confirm(self, cells: Sequence[Cell], prompts: PromptSet, repeats: int) -> Confirmed:
        """Measure the schedule that cells make, and every fixed length of them, on held-out prompts."""
        numbers = self.loads.concurrency
        lengths = {at: fastest([cell for cell in cells if cell.concurrency == at], self.loads) for at in numbers}
        measured = dict[str, list[Cell]]()

        def add(name: str, backend: ServedBackend, length: int) -> None:
            if found := self._measured(backend, length, prompts, "held-out", repeats):
                scheduled = lengths if backend.schedule else dict.fromkeys(numbers, length)
                measured[name] = [replace(cell, num_speculative_tokens=scheduled[cell.concurrency]) for cell, _ in found]

        for length in sorted({cell.num_speculative_tokens for cell in cells}):
            add(f"always {length}", self.backend, length)
        longest = max(lengths.values())
        if len(set(lengths.values())) > 1:
            self.backend.close()  # its engines would hold memory
            scheduled = replace(self.backend, schedule=as_ranges(lengths))
            with contextlib.closing(scheduled):
                add(_SCHEDULE, scheduled, longest)
        elif longest and f"always {longest}" in measured:
            measured[_SCHEDULE] = measured[f"always {longest}"]
        if longest and _SCHEDULE not in measured:
            say("the schedule could not be measured on held-out prompts: no drafting")
            return Confirmed(dict.fromkeys(numbers, 0), measured, _OFF)
        lost = [cell for cell in measured.get(_SCHEDULE, ()) if self._loses(cell)]
        for cell in lost:
            why = "loses to plain decoding" if cell.keeps_output else "changes the output"
            say(f"no drafting at {cell.concurrency} requests, where it {why} on held-out prompts")
        lengths |= {cell.concurrency: 0 for cell in lost}
        if self.loads.limit_seconds is None and any(lengths.values()):
            # An engine that can draft may be slower than one that cannot, also where its schedule says 0.
            own = _geometric_mean(1.0 if cell in lost else cell.speedup[0] for cell in measured[_SCHEDULE])
            fixed = {_OFF: 1.0} | {
                name: _geometric_mean(cell.speedup[0] for cell in row)
                for name, row in measured.items()
                if name != _SCHEDULE and all(cell.keeps_output for cell in row)
            }
            best = max(fixed, key=lambda name: fixed[name])
            if fixed[best] > own:
                faster = "no drafting" if best == _OFF else best
                say(f"over all numbers of requests, {faster} is faster than the schedule")
                length = 0 if best == _OFF else measured[best][0].num_speculative_tokens
                return Confirmed(dict.fromkeys(numbers, length), measured, best)
        return Confirmed(lengths, measured, _SCHEDULE if any(lengths.values()) else _OFF)

    def _loses(self, cell: Cell) -> bool:
        """Whether a schedule that drafts loses at a number of requests: in output, in speed, or under the limit."""
        if not cell.num_speculative_tokens:
            return False
        slower = cell.speedup[2] < 1 if self.loads.limit_seconds is None else not fastest([cell], self.loads)
        return slower or not cell.keeps_output

    def _measured(
        self, backend: ServedBackend, length: int, prompts: PromptSet, stage: str, repeats: int = 1
    ) -> list[tuple[Cell, Measurement]]:
        """Return a length at each number of requests; nothing if the engine cannot run it.

        In the held-out stage, plain decoding counts twice.
        """
        config, name = self.of_length(length), _SCHEDULE if backend.schedule else f"length {length}"
        configs = {CANDIDATE: config} | ({_AGAIN: SpeculativeConfig()} if stage == "held-out" else {})
        found: list[tuple[Cell, Measurement]] = []
        for concurrency in self.loads.concurrency:
            bench = ModelBench(backend, Sampling(), self.max_new_tokens, self.loads.workload(concurrency))
            rows: list[Mapping[str, Any]] = []
            for repeat in range(repeats):
                measure = partial(bench.compare, configs, repeats=1, seed=self.seed + 1000 * repeat)
                prefix = f"{stage} {digest([config.to_dict(), backend.schedule])[:8]} {concurrency} {repeat}"
                try:
                    rows += resumed_rows(measure, prompts, self.log, prefix, together=concurrency > 1)
                except BackendError as error:
                    if error.name != CANDIDATE:
                        raise
                    say(f"{stage}: {name} is left out: {error.reason}")
                    return []
            check_output((row[BASELINE] for row in rows), "plain ")
            cell = Cell.of(rows, self.loads, concurrency, length)
            say(f"{stage}: {name}, {concurrency} in flight: {with_interval(*cell.speedup)} x plain decoding")
            self.on_cell(f"{stage.replace('-', '_')}_{name.replace(' ', '_')}_speedup", cell)
            found.append((cell, Measurement.of(rows, BASELINE, CANDIDATE)))
        return found


def schedule(config: DictConfig) -> Confirmed:
    """Find the schedule, write the export and the report, and print it; ``conf/schedule.yaml`` is the configuration."""
    loads = _checked(config)
    prompts: PromptSet = instantiate(config.prompts)
    tune, held_out = (half.take(config.measure.prompts) for half in prompts.split())
    if (most := min(len(tune), len(held_out))) < max(loads.concurrency):
        needed = f"{max(loads.concurrency)} requests need as many prompts in each half"
        raise InputError(f"workload.concurrency: {needed}, which has {most}")
    target: Target = instantiate(config.target)
    check_prompts(prompts, target, config.measure.max_new_tokens)
    backend = backend_alone(config, target)
    drafter = _drafter(config.config, target, backend)
    assert isinstance(backend, ServedBackend)
    settings = {"lengths": sorted(set(config.lengths)), "measure": OmegaConf.to_container(config.measure), **asdict(loads)}
    identity = digest(
        [settings, drafter.to_dict(), attachment_digests(drafter), prompts.digest, backend.describe(), config.seed]
    )[:12]
    outputs = Path(config.outputs)
    unfinished, folder = outputs / f"schedule-{identity}.jsonl", outputs / "schedule"
    tracker = Tracker(config.tracking.uri, outputs, config.tracking.experiment)
    texts = {"config.yaml": OmegaConf.to_yaml(config)}
    tracker.open_study(f"schedule of {drafter.label()}", identity, settings, environment(target), "schedule", prompts, texts)

    def log(name: str, cell: Cell) -> None:
        tracker.log({name: cell.speedup[0]}, cell.concurrency)

    with tracker.closing(), closing(backend):
        tokens = config.measure.max_new_tokens
        search = Search(backend, drafter, loads, settings["lengths"], tokens, config.seed, ResultLog(unfinished), log)
        cells = search.tune(tune, config.predict and loads.percentile is None)
        found = search.confirm(cells, held_out, config.measure.repeats)
        _export(found, search, target, held_out).save(folder / "best.json")
        record = record_header("layerskip.schedule/1", target) | {
            "settings": settings,
            "max_new_tokens": tokens,
            "repeats": config.measure.repeats,
            "config": drafter.to_dict(),
            "backend": backend.describe(),
            "prompts": {"name": prompts.name, "count": len(held_out), "digest": held_out.digest},
            "tune": [cell.to_dict() for cell in cells],
            "held_out": {
                name: {f"at_{cell.concurrency}": cell.to_dict() for cell in row}
                | {"geometric_mean": _geometric_mean(cell.speedup[0] for cell in row)}
                for name, row in found.cells.items()
            },
            "lengths": found.lengths,
            "ranges": found.ranges,
        }
        write_json(folder / "schedule.json", record)
        text = report(found, cells, loads, record)
        (folder / "schedule.md").write_text(f"{text}\n", encoding="utf-8")
        _draw(found, folder / "schedule.png")
        for name in ("best.json", "schedule.json", "schedule.md", "schedule.png"):
            tracker.log_file(folder / name)
    unfinished.unlink(missing_ok=True)
    print(text)
    print(f"wrote {folder / 'best.json'}; python -m searches.export {folder / 'best.json'} engine=vllm prints the command")
    return found


def _checked(config: DictConfig) -> Loads:
    """Refuse settings that cannot be used, before anything is loaded, and return the loads."""
    check_seed(config.seed)
    check_flag("predict", config.predict)
    check_list("lengths", config.lengths, or_empty=False)
    for length in config.lengths:
        check_whole("lengths", length)
    for name in ("max_new_tokens", "repeats", "prompts"):
        if name != "prompts" or config.measure.prompts is not None:
            check_whole(f"measure.{name}", config.measure[name])
    if not instantiate(config.sampling).greedy:
        raise InputError("sampling: outputs are compared greedily; sampling=greedy")
    if config.backend.get("schedule"):
        raise InputError("backend.schedule: is what this program finds")
    asked = config.workload
    check_list("workload.concurrency", asked.concurrency, or_empty=False)
    for count in asked.concurrency:
        check_whole("workload.concurrency", count)
    return Loads(tuple(sorted(set(asked.concurrency))), asked.goal, asked.limit_seconds)


def _drafter(file: str | None, target: Target, backend: Backend) -> SpeculativeConfig:
    """Return the configuration of an export, or that of prompt lookup, with which the engine must be able to draft."""
    if not isinstance(backend, ServedBackend) or not backend.takes_schedules:
        raise InputError("backend: takes no schedule; backend=vllm, or backend=server with {speculative_config}")
    if file is None:
        config = SpeculativeConfig.of("prompt_lookup", methods()["prompt_lookup"].first)
    else:
        export = Export.load(file)
        export.check(target)
        config = export.config
    if "num_speculative_tokens" not in methods()[config.method]:
        raise InputError(f"config: {config.label()} has no draft length")
    if (reason := backend.supports(config.method)) is not None:
        raise InputError(f"config: {reason}")
    return config


def _export(found: Confirmed, search: Search, target: Target, prompts: PromptSet) -> Export:
    """Return the export, whose evidence is that of the fewest requests at which it drafts."""
    drafting = [at for at, length in found.lengths.items() if length]
    config = search.of_length(max(found.lengths.values()))
    backend = replace(search.backend, schedule=found.ranges)
    evidence: dict[str, Any] = {"prompts_digest": prompts.digest, "max_new_tokens": search.max_new_tokens}
    for cell in found.row:
        if cell.concurrency in drafting[:1]:
            evidence |= {**cell.measurement, METRICS: cell.metrics, "goal_speedup": list(cell.speedup)}
    where = environment(target) | described(backend, search.loads.workload(min(drafting, default=1)))
    return Export(target.describe(), config, Sampling(), evidence, where)


def _geometric_mean(speedups: Iterable[float]) -> float:
    """Return the speedup over all numbers of requests, each of which counts alike."""
    return math.exp(statistics.fmean(map(math.log, speedups)))


def report(found: Confirmed, cells: Sequence[Cell], loads: Loads, record: Mapping[str, Any]) -> str:
    """Return the schedule and its evidence as Markdown."""
    *spans, (last, _, final) = as_ranges(found.lengths)
    shares = [f"{first} to {end}: {length or 'off'}" for first, end, length in spans] + [f"from {last}: {final or 'off'}"]
    lines = [f"num_speculative_tokens by requests in flight: {'; '.join(shares)}", "", f"goal: {loads.goal}", ""]
    by_contender: list[Row] = []
    for name, row in found.cells.items():
        shown = {f"{cell.concurrency} in flight": with_interval(*cell.speedup) for cell in row}
        mean = f"{_geometric_mean(cell.speedup[0] for cell in row):.2f}"
        by_contender.append({"held-out prompts": name} | shown | {"geometric mean": mean})
    off = {f"{at} in flight": "1.00" for at in loads.concurrency}
    by_contender.append({"held-out prompts": _OFF} | off | {"geometric mean": "1.00"})
    requests: list[Row] = []
    for cell in found.row:
        metrics, shown = cell.metrics, {"in flight": str(cell.concurrency)}
        for title, name, factor in _LATENCIES:
            shown[title] = f"{factor * metrics[name]:.1f} (off: {factor * metrics[f'{BASELINE}_{name}']:.1f})"
        shown["outputs that differ"] = "{different} of {compared}, and {near_ties} near-ties".format(
            **cell.measurement["losslessness"]
        )
        requests.append(shown | {"of plain decoding from itself": str(cell.noise)})
    tuned = [
        {
            "tune prompts": f"length {cell.num_speculative_tokens}, {cell.concurrency} in flight",
            "speedup": with_interval(*cell.speedup),
            "predicted": "" if cell.predicted is None else f"{cell.predicted:.2f}",
            "tokens/round": f"{cell.measurement['mean_acceptance_length']:.2f}",
        }
        for cell in cells
    ]
    for rows in (by_contender, requests, tuned):
        lines += [*as_markdown(rows), ""] if rows else []
    return "\n".join([*lines, conditions(record)])


_LATENCIES = (
    ("tokens/s", "throughput", 1.0),
    ("ms/token p95", "tpot_p95", 1000.0),
    ("ms to first p95", "ttft_p95", 1000.0),
)


def _draw(found: Confirmed, path: Path) -> None:
    """Save the speedups on held-out prompts by requests in flight as a picture."""
    picture = Figure(figsize=(8, 5), layout="constrained")
    axes = picture.subplots()
    for name, row in found.cells.items():
        speedups = np.array([cell.speedup for cell in row]).T
        bars = np.abs(speedups[1:] - speedups[0])
        at, width = [cell.concurrency for cell in row], 2.5 if name == _SCHEDULE else 1
        axes.errorbar(at, speedups[0], bars, capsize=3, marker="o", label=name, linewidth=width)
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="requests in flight", ylabel="speedup over no drafting")
    axes.legend()
    picture.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.argv[1:] = command_line(sys.argv[1:], "config")
    run("schedule", schedule)
