"""The page of a study, as a file: what it holds for studies in every state, of workers and engines; when it is written."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import create_trial

from searches.app.checks import InputError
from searches.report import charts
from searches.report.charts import points, timeline
from searches.report.page import FINISHED, LiveView, Page, write_page
from searches.tracking.names import METRICS, PREDICTED
from searches.workers.pool import Alone
from tests.searches.known import Known, lookup, run_known
from tests.searches.report.pages import EARLIER_LAYERS, earlier_study, engine_study, known_study, metrics_of, workers_study


def _places(figure: dict[str, Any]) -> list[tuple[float, float]]:
    """The markers of a figure, in order."""
    traces = [trace for trace in figure["data"] if trace.get("mode") == "markers"]
    return sorted(pair for trace in traces for pair in zip(trace["x"], trace["y"], strict=True))


def _trace(figure: dict[str, Any], name: str) -> dict[str, Any]:
    (trace,) = (trace for trace in figure["data"] if trace["name"] == name)
    return dict(trace)


def _written(folder: Path, study: optuna.Study, layers: int = 6, **fields: Any) -> str:
    write_page(folder / "report.html", study, Page(layers, 8, **fields))
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_charts_of_an_earlier_study_hold_what_its_journal_holds(tmp_path: Path) -> None:
    study = earlier_study(tmp_path)
    figures = metrics_of(_written(tmp_path, study, EARLIER_LAYERS))
    # From the file itself: the study's results, without the code that reads trials.
    journal = (tmp_path / study.study_name / "journal.log").read_text(encoding="utf-8").splitlines()
    lines = [json.loads(line) for line in journal if '"user_attr"' in line and '"trial_id"' in line]
    stored: dict[int, dict[str, Any]] = {}
    for line in lines:
        stored.setdefault(line["trial_id"], {}).update(line["user_attr"])
    measured = {trial: attributes["measurement"] for trial, attributes in stored.items()}
    speedups = {trial: figures["speedup"] for trial, figures in measured.items()}
    assert _places(figures["history"]) == sorted(speedups.items())
    drafting = [figures for trial, figures in measured.items() if stored[trial]["config"]["method"] != "none"]
    assert _places(figures["acceptance"]) == sorted((f["acceptance_rate"], f["speedup"]) for f in drafting)
    assert _places(figures["memory"]) == sorted((f["peak_memory_bytes"] / 2**20, f["speedup"]) for f in measured.values())
    predicted = {trial: attributes[PREDICTED] for trial, attributes in stored.items() if PREDICTED in attributes}
    assert _places(figures["predictions"]) == sorted((value, speedups[trial]) for trial, value in predicted.items())
    durations = sorted(seconds for trace in figures["timeline"]["data"] for seconds in trace["x"])
    assert durations == pytest.approx(sorted(attributes["seconds"] for attributes in stored.values()))
    # Trial 4 skipped layers 1 to 6, trial 5 layers 1 and 2.
    both, one = (speedups[4] + speedups[5]) / 2, speedups[4]
    assert figures["skips"]["data"][0]["z"] == [[None, *[pytest.approx(both)] * 2, *[one] * 4, None, None, None]] * 2


def test_neither_a_changed_output_nor_a_trial_stopped_early_leads() -> None:
    study, _ = known_study()
    slow, fast, *_ = sorted(points(study.trials), key=lambda point: -point.trial)
    changed = fast.metrics | {"speedup": 3.0, "acceptance_rate": 0.9, "losslessness": {"verdict": "different"}}
    rest = [replace(slow, config=lookup(2)), replace(fast, metrics=changed)]
    rest.append(replace(fast, complete=False, metrics=fast.metrics | {"speedup": 4.0}))
    for figure in (charts.history(rest), charts.acceptance(rest), charts.memory(rest)):
        assert figure is not None
        drawn = figure.to_dict()
        assert len(_places(drawn)) == 3
        (line,) = (trace for trace in drawn["data"] if trace["mode"] == "lines")
        assert list(line["y"]) == [slow.speedup]


def test_a_study_without_finished_trials_has_a_page(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="empty", direction="maximize")
    study.ask()
    page = _written(tmp_path, study)
    assert "0 of 8 trials finished" in page
    assert "Nothing measured yet." in page
    assert list(metrics_of(page)) == ["timeline"]


def test_a_page_loads_nothing_and_shows_names_as_they_are_written(tmp_path: Path) -> None:
    study, finals = known_study()
    page = _written(tmp_path, study, notes=["<script>alert(1)</script>"], state=FINISHED, finals=finals)
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
    figure, _ = timeline(trials, begin)
    assert figure is not None
    (bars,) = figure.data
    assert list(bars.base) == [0.0, 10.0, 20.0, 20.0]
    assert [note.text for note in figure.layout.annotations] == ["26.0 hours"]


def test_a_page_that_cannot_be_written_stops_no_study(tmp_path: Path) -> None:
    study = run_known(Known({lookup(4): 1.5}), lookup(4))
    (tmp_path / "report.html").mkdir()
    view = LiveView(study, tmp_path, 6, 5)
    view.begin("trials")
    view.refresh()
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_first_worker_writes_the_page_until_one_is_alone(tmp_path: Path) -> None:
    class Second(Alone):
        def leads(self) -> bool:
            return False

    study = run_known(Known({lookup(4): 1.5}), lookup(4))
    view = LiveView(study, tmp_path, 6, 5, Second())
    view.begin("trials")
    assert not list(tmp_path.iterdir())
    view.begin("finals", is_alone=True)
    assert "running: finals" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_running_study_is_written_at_max_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps = 1000.0, list[int]()
    monkeypatch.setattr("searches.report.page.time.monotonic", lambda: now)
    study = run_known(Known({lookup(4): 1.5}), lookup(4))
    view, path = LiveView(study, tmp_path, 6, 5), tmp_path / "report.html"
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
def test_a_study_that_ends_early_says_why(error: BaseException, state: str, why: str, tmp_path: Path) -> None:
    study = run_known(Known({lookup(4): 1.5}), lookup(4))
    with pytest.raises(type(error)), LiveView(study, tmp_path, 6, 5).closing():
        raise error
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f'<span class="badge {state}">{state}</span>' in page
    assert f"<p>{why}</p>" in page
    assert not any(part in page for part in ("a password", 'http-equiv="refresh"'))


def test_the_timeline_shows_who_took_over_a_killed_trial(tmp_path: Path) -> None:
    page = _written(tmp_path, workers_study())
    figure = metrics_of(page)["timeline"]
    assert figure["layout"]["yaxis"]["categoryarray"] == ["b/10", "b/2", "a/1"]  # from the bottom
    killed = _trace(figure, "killed")
    assert killed["y"] == ["b/2"] and [round(60 * x) for x in killed["x"]] == [70]
    bars = {trace["name"]: trace for trace in figure["data"] if trace["type"] == "bar"}
    skips = {"layer skip, complete", "layer skip, fail", "layer skip, running"}
    assert bars.keys() == skips | {"none, complete", "prompt lookup, complete"}
    assert "takes over trial 3" in bars["layer skip, fail"]["hovertext"][0]  # the only one: a duplicate took no time
    assert len(bars["layer skip, fail"]["x"]) == 1
    assert "3 of 8 trials finished, 1 running, a processor, 8 threads" in page


def test_throughput_against_latency_has_the_front_of_the_report(tmp_path: Path) -> None:
    page = _written(tmp_path, engine_study())
    figures = metrics_of(page)
    trials = _trace(figures["tpot"], "prompt lookup")
    assert trials["x"] == [20.0, 30.0, 10.0]
    assert trials["y"] == [100.0, 90.0, 80.0]
    assert [round(tail, 9) for tail in trials["error_x"]["array"]] == [10.0, 30.0, 0.0]
    front = _trace(figures["tpot"], "Pareto front")
    assert list(zip(front["x"], front["y"], strict=True)) == [(10.0, 80.0), (20.0, 100.0)]
    plain = _trace(figures["tpot"], "plain decoding")
    assert (plain["x"], plain["y"]) == ([40.0], [70.0])
    assert "95 % below 50.0" in plain["text"][0]
    assert [trace["name"] for trace in figures["ttft"]["data"]] == ["prompt lookup", "Pareto front"]
    assert "Hatched: the engine failed." in page and "Faint: stopped early or not run." not in page
    assert 'data-name="ms/token p95">30.0<' in page


def test_each_number_of_requests_in_flight_has_its_charts(tmp_path: Path) -> None:
    other = optuna.create_study(study_name="levels", direction="maximize")
    for trial in engine_study().trials:
        load = trial.user_attrs.get(METRICS, {})
        several = {f"{name}_at_{n}": factor * value for name, value in load.items() for n, factor in ((8, 1), (18, 2))}
        trial.user_attrs = trial.user_attrs | {METRICS: several}
        other.add_trial(trial)
    page = _written(tmp_path, other)
    figures = metrics_of(page)
    loads = [name for name in figures if name.startswith(("tpot", "ttft"))]
    assert loads == ["tpot_at_8", "tpot_at_18", "ttft_at_8", "ttft_at_18"]
    assert _trace(figures["tpot_at_8"], "prompt lookup")["y"] == [100.0, 90.0, 80.0]
    assert _trace(figures["tpot_at_18"], "plain decoding")["y"] == [140.0]
    assert page.count("Requests in flight: 8.") == page.count("Requests in flight: 18.") == 3  # two charts and a table
    _, lower, higher = page.partition("<h2>Best trials</h2>")[2].partition("</section>")[0].split("<table>")[1:]
    assert 'data-name="ms/token p95">30.0<' in lower and 'data-name="ms/token p95">60.0<' in higher
