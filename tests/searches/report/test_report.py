"""``report.html``, as a file, and ``report.md``: what they hold for studies in every state, of workers and engines."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState, create_trial

from layerskip import DraftPlan, PromptSet
from layerskip.measure.losslessness import Divergence, Losslessness
from layerskip.measure.measurement import Sample
from layerskip.prompts import PromptItem
from searches.app.checks import InputError
from searches.report import charts
from searches.report import markdown as report
from searches.report.page import FINISHED, LiveView, Page, write_page
from searches.report.tables import pareto_front, trial_tables
from searches.study.finals import measure_finals
from searches.study.objective import MeasureSettings
from searches.tracking.names import DRIFTED, METRICS, STARTUP_SECONDS
from searches.workers.pool import Workers
from tests.searches.known import HELD_OUT, Known, lookup, run_known
from tests.searches.report.pages import SKIP, engine_study, known_study, metrics_of, workers_study


def _places(figure: dict[str, Any]) -> list[tuple[float, float]]:
    """The markers of a figure, in order."""
    traces = [trace for trace in figure["data"] if trace.get("mode") == "markers"]
    return sorted(pair for trace in traces for pair in zip(trace["x"], trace["y"], strict=True))


def _trace(figure: dict[str, Any], name: str) -> dict[str, Any]:
    (trace,) = (trace for trace in figure["data"] if trace["name"] == name)
    return dict(trace)


def _written(folder: Path, study: optuna.Study, **fields: Any) -> str:
    write_page(folder / "report.html", study, Page(8, **fields))
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_charts_hold_what_was_measured(tmp_path: Path) -> None:
    study, _ = known_study()
    figures = metrics_of(_written(tmp_path, study))
    expected = [(0, 1.6), (1, 1.2), (2, 0.7), (3, 1.4), (4, 1.0)]
    assert _places(figures["history"]) == [(trial, pytest.approx(speedup)) for trial, speedup in expected]
    assert [speedup for _, speedup in _places(figures["acceptance"])] == pytest.approx([0.7, 1.2, 1.4, 1.6])
    assert "plan" not in figures  # the number of layers is unknown without a scan
    chart = metrics_of(_written(tmp_path, study, singles=np.full((2, 6), np.nan)))["plan"]["data"][0]
    plan = DraftPlan.parse(SKIP.mask, 6)
    assert chart["text"] == [[plan.treatment(kind, layer) for layer in range(6)] for kind in ("attention", "mlp")]
    durations = [1000 * seconds for seconds in (0.0, *[2.0] * 5)]  # that of the killed trial is unknown
    assert sorted(taken for trace in figures["timeline"]["data"] for taken in trace["x"]) == durations


def test_neither_a_changed_output_nor_a_trial_stopped_early_leads() -> None:
    study, _ = known_study()
    *_, fast, slow = (trial for trial in study.trials if "measurement" in trial.user_attrs)
    changed, stopped = copy.deepcopy(fast), copy.deepcopy(fast)
    changed.user_attrs["measurement"] |= {"speedup": 3.0, "acceptance_rate": 0.9, "losslessness": {"verdict": "different"}}
    stopped.user_attrs["measurement"] |= {"speedup": 4.0}
    stopped.state, slow.user_attrs["config"] = TrialState.PRUNED, lookup(2).to_dict()
    for figure in (charts.history([slow, changed, stopped]), charts.acceptance([slow, changed, stopped])):
        assert figure is not None
        drawn = figure.to_dict()
        assert len(_places(drawn)) == 3
        (line,) = (trace for trace in drawn["data"] if trace["mode"] == "lines")
        assert list(line["y"]) == [slow.user_attrs["measurement"]["speedup"]]


def test_a_study_without_finished_trials_has_a_page(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="empty", direction="maximize")
    study.ask()
    page = _written(tmp_path, study)
    assert "0 of 8 trials finished" in page
    assert "Nothing measured yet." in page
    assert list(metrics_of(page)) == ["timeline"]


def test_a_page_loads_nothing_and_shows_names_as_they_are_written(tmp_path: Path) -> None:
    study, finals = known_study()
    page = _written(tmp_path, study, reason="<script>alert(1)</script>", state=FINISHED, finals=finals)
    own = page.replace(page.partition("<script>")[2].partition("</script>")[0], "")  # without plotly.js
    assert not any(part in own for part in ("src=", "href=", "@import", "url(", "<script>alert", "<b>&amp;"))
    assert "known &lt;b&gt;&amp;amp;" in own
    assert page.count("plotly.js v") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_pause_is_cut_out_of_the_timeline() -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    trials = []
    for minutes, seconds in ((0, 600.0), (10, 600.0), (20, 0.0), (20 + 26 * 60, 600.0)):  # 26 hours pass after the third
        trial = create_trial(value=1.0, user_attrs={"config": lookup(4).to_dict(), "seconds": seconds})
        trial.datetime_start = begin + timedelta(minutes=minutes)
        trials.append(trial)
    figure = charts.timeline(trials, begin)
    assert figure is not None
    (bars,) = figure.data
    assert list(bars.base) == [trial.datetime_start for trial in trials]
    (pause,) = figure.layout.xaxis.rangebreaks
    assert list(pause.bounds) == [trial.datetime_start for trial in trials[2:]]


@pytest.fixture
def study() -> optuna.Study:
    """A study of one trial."""
    return run_known(Known({lookup(4): 1.5}), lookup(4))


def test_a_page_that_cannot_be_written_stops_no_study(study: optuna.Study, tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    view = LiveView(study, tmp_path, 5)
    view.begin("trials")
    view.refresh()
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_first_worker_writes_the_page_until_one_is_alone(study: optuna.Study, tmp_path: Path) -> None:
    class Second(Workers):
        def leads(self) -> bool:
            return False

    view = LiveView(study, tmp_path, 5, Second())
    view.begin("trials")
    assert not list(tmp_path.iterdir())
    view.begin("finals", is_alone=True)
    assert "running: finals" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_running_study_is_written_at_max_once_a_minute(
    study: optuna.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, steps = 1000.0, list[int]()
    monkeypatch.setattr("searches.report.page.time.monotonic", lambda: now)
    view, path = LiveView(study, tmp_path, 5), tmp_path / "report.html"
    view.begin("trials")
    assert "running: trials" in path.read_text(encoding="utf-8")
    for seconds, update in ((59.0, view.refresh), (1.0, view.refresh), (0.0, view.after(lambda: steps.append(1)))):
        path.unlink(missing_ok=True)
        now += seconds
        update()
        assert path.exists() == (seconds == 1.0)
    assert steps == [1]
    now += 60.0
    view.after(lambda: None)()
    assert "1 of 5 trials finished" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("error", "state", "why"),
    [
        (KeyboardInterrupt(), "interrupted", "Interrupted: the same command continues."),
        (InputError("backend: out of memory"), "failed", "It ended with an error: backend: out of memory"),
        (ValueError("a password"), "failed", "It ended with an error: ValueError"),
    ],
)
def test_a_study_that_ends_early_says_why(
    error: BaseException, state: str, why: str, study: optuna.Study, tmp_path: Path
) -> None:
    with pytest.raises(type(error)), LiveView(study, tmp_path, 5).closing():
        raise error
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f'<span class="badge {state}">{state}</span>' in page
    assert f"<p>{why}</p>" in page
    assert not any(part in page for part in ("a password", 'http-equiv="refresh"'))


def test_the_timeline_shows_who_took_over_a_killed_trial(tmp_path: Path) -> None:
    page = _written(tmp_path, workers_study())
    figure = metrics_of(page)["timeline"]
    assert figure["layout"]["yaxis"]["categoryarray"] == ["b/10", "b/2", "a/1"]  # from the bottom
    (bars,) = figure["data"]  # without the duplicate, which took no time
    places = [bars["hovertext"].index(text) for text in bars["hovertext"] if ", fail<br>" in text]
    assert [(bars["y"][place], bars["x"][place]) for place in places] == [("b/2", 0.0), ("b/10", 5000.0)]  # one was killed
    assert "takes over trial 3" in bars["hovertext"][places[1]]
    unfinished = [color == "#9aa3af" for color in bars["marker"]["color"]]
    assert unfinished == ["complete" not in text for text in bars["hovertext"]]
    assert sum(unfinished) == 3
    assert "3 of 8 trials finished, 1 running, a processor, 8 threads" in page


def test_throughput_against_latency_has_the_front_of_the_report(tmp_path: Path) -> None:
    figure = metrics_of(_written(tmp_path, engine_study()))["load"]
    trials = _trace(figure, "trials")
    assert trials["x"] == [20.0, 30.0, 10.0]
    assert trials["y"] == [100.0, 90.0, 80.0]
    front = _trace(figure, "Pareto front")
    assert list(zip(front["x"], front["y"], strict=True)) == [(10.0, 80.0), (20.0, 100.0)]
    plain = _trace(figure, "plain decoding")
    assert (plain["x"], plain["y"]) == ([40.0], [70.0])


def test_an_engine_has_a_table_of_its_front(tmp_path: Path) -> None:
    trials = engine_study().trials
    table = _written(tmp_path, engine_study()).partition("Throughput and latency (Pareto front)</h2><table>")[2]
    assert 'data-name="ms/token p95">30.0<' in table.partition("</table>")[0]
    trials[2].user_attrs["measurement"] |= {"losslessness": {"verdict": "different"}}  # otherwise on the front
    _, front = trial_tables(trials).values()
    assert [row["trial"] for row in front] == ["0"]
    assert len(trial_tables(known_study()[0].trials[:1])) == 1


@pytest.mark.usefixtures("a_second_a_row")
def test_the_report_states_the_speedup_and_the_cost_of_the_search() -> None:
    fast = lookup(4)
    bench = Known({fast: 1.5})
    study = run_known(bench, fast)
    bench.speedups = {fast: 1.25}  # the search was lucky
    categories = ["two"] * 2 + ["three"] * 3 + ["many"] * 19
    prompts = PromptSet(tuple(replace(item, category=name) for item, name in zip(HELD_OUT, categories, strict=True)))
    finals = measure_finals(study, bench, prompts, MeasureSettings(finalists=1, held_out_repeats=1), 0)
    text = report.summary(study, finals)
    assert "(95 % interval 1.25 to 1.25)" in report.verdict(finals)
    seconds = report.search_seconds(study, finals)
    assert finals.seconds == 24
    # Plain decoding takes 0.1 seconds a token, the winner 0.08.
    assert f"{seconds:.0f} seconds. {seconds / 0.02:,.0f} generated tokens pay it back." in text
    assert "Its speedup was 1.50 in the search and 1.25 on held-out prompts." in text
    assert "By category: many 1.25 (1.25 to 1.25), three 1.25 (1.25 to 1.25), two 1.25." in text  # two have no interval


def test_the_report_leaves_out_trials_that_were_not_run() -> None:
    fast, slow = lookup(4), lookup(6)
    study = run_known(Known({fast: 1.5, slow: 1.2}), fast, slow, slow, slow)
    assert ["measurement" in trial.user_attrs for trial in study.trials] == [True, True, True, False]
    text = report.summary(study, None)
    assert [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| ")] == ["trial", "0", "1", "2"]
    assert "4 trials: 0 stopped early, 1 not run (1 measured before)." in text


class _Changing(Known):
    """Its candidates write other tokens."""

    @staticmethod
    def _sample(item: PromptItem, seconds: float) -> Sample:
        changed = Losslessness(1, (Divergence(item.id, 1, 9.0, 0.0),))
        return replace(Known._sample(item, seconds), lossless=changed if seconds < 1 else Losslessness(1))


def test_the_report_names_changed_outputs_drift_and_the_seconds_of_starts() -> None:
    fast, slow = lookup(4), lookup(6)
    study = run_known(_Changing({fast: 1.5, slow: 0.5}, exact=False), slow, fast)
    copied = optuna.create_study(direction="maximize")
    for trial, seconds in zip(study.trials, (3.0, 5.0), strict=True):
        trial.user_attrs = trial.user_attrs | {METRICS: {STARTUP_SECONDS: seconds}, DRIFTED: 2}
        copied.add_trial(trial)
    text = report.summary(copied, None)
    assert "Trials [1] changed an output beyond a near-tie; they cannot win." in text
    assert "2 trials began with 4.0 seconds of compiling" in text
    assert "speed changed on 4 prompts, which were measured again" in text


def test_the_front_is_what_no_other_point_exceeds() -> None:
    source = random.Random(3)
    points = {n: (float(source.randint(0, 9)), float(source.randint(1, 9))) for n in range(40)}
    front = pareto_front(points | {40: (99.0, None), 41: (None, 0.1)})
    for name, (more, less) in points.items():
        exceeded = any(a >= more and b <= less and (a, b) != (more, less) for a, b in points.values())
        assert (name in front) == (not exceeded)
    assert all(points[one][0] >= points[other][0] for one, other in itertools.pairwise(front))
