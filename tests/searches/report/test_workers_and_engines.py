"""The page of studies of several workers, on several types of devices, and on engines."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import optuna

from searches.report.html_report import Page, write_page
from searches.report.timeline import timeline
from searches.tracking.names import FIGURES
from tests.searches.report.pages import engine_study, figures_of, workers_study


def _trace(figure: dict[str, Any], name: str) -> dict[str, Any]:
    (trace,) = (trace for trace in figure["data"] if trace["name"] == name)
    return dict(trace)


def _page(folder: Path, study: Any, layers: int = 6) -> str:
    write_page(folder / "report.html", study, Page(layers, 8))
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_timeline_shows_who_took_over_a_killed_trial(tmp_path: Path) -> None:
    page = _page(tmp_path, workers_study())
    figure = figures_of(page)["timeline"]
    assert figure["layout"]["yaxis"]["categoryarray"] == ["b/10", "b/2", "a/1"]  # from the bottom
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["b/10", "b/2", "a/1"]
    killed, line = _trace(figure, "killed"), _trace(figure, "taken over")
    assert killed["y"] == ["b/2"]
    assert line["y"] == ["b/2", "b/10", None, "b/10", "a/1", None]
    assert [None if x is None else round(60 * x) for x in line["x"]] == [70, 300, None, 305, 310, None]
    bars = {trace["name"]: trace for trace in figure["data"] if trace["type"] == "bar"}
    again = {"layer skip, complete", "layer skip, fail", "layer skip, running"}
    assert bars.keys() == again | {"none, complete", "prompt lookup, complete"}
    assert "takes over trial 3" in bars["layer skip, fail"]["hovertext"][0]  # the only one: a duplicate took no time
    assert len(bars["layer skip, fail"]["x"]) == 1
    assert "Cross: killed. Dotted: to the trial that took over." in page
    assert "3 of 8 trials finished, 1 running, a processor, 8 threads" in page


def test_a_study_without_incidents_describes_none(tmp_path: Path) -> None:
    study = engine_study()
    figure = timeline(study.trials[:3], datetime.now().astimezone())
    assert figure is not None
    assert {trace["type"] for trace in figure["data"]} == {"bar"}
    page = _page(tmp_path, study)
    assert "Faint: stopped early or not run." not in page
    assert "Hatched: the engine failed." in page
    card = page.partition("<h2>Timeline</h2>")[2].partition("</section>")[0]
    assert not any(word in card for word in ("killed", "took over", "interrupted"))


def test_throughput_against_latency_has_the_front_of_the_report(tmp_path: Path) -> None:
    page = _page(tmp_path, engine_study())
    figures = figures_of(page)
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
    assert "Requests in flight: 8." in page
    assert 'data-name="ms/token p95">30.0<' in page


def test_each_number_of_requests_in_flight_has_its_charts(tmp_path: Path) -> None:
    study = engine_study()
    other = optuna.create_study(study_name="levels", direction="maximize")
    for trial in study.trials:
        load = trial.user_attrs.get(FIGURES, {})
        several = {f"{name}_at_8": value for name, value in load.items()}
        several |= {f"{name}_at_18": 2 * value for name, value in load.items()}
        trial.user_attrs = trial.user_attrs | {FIGURES: several}
        other.add_trial(trial)
    page = _page(tmp_path, other)
    figures = figures_of(page)
    loads = [name for name in figures if name.startswith(("tpot", "ttft"))]
    assert loads == ["tpot_at_8", "ttft_at_8", "tpot_at_18", "ttft_at_18"]
    assert _trace(figures["tpot_at_8"], "prompt lookup")["y"] == [100.0, 90.0, 80.0]
    assert _trace(figures["tpot_at_18"], "prompt lookup")["x"] == [40.0, 60.0, 20.0]
    assert _trace(figures["tpot_at_18"], "plain decoding")["y"] == [140.0]
    assert page.count("Requests in flight: 8.") == page.count("Requests in flight: 18.") == 3  # two charts and a table
    _, lower, higher = page.partition("<h2>Best trials</h2>")[2].partition("</section>")[0].split("<table>")[1:]
    assert 'data-name="ms/token p95">30.0<' in lower and 'data-name="ms/token p95">60.0<' in higher
    assert page.index('id="tpot_at_8"') < page.index('id="tpot_at_18"') < page.index('id="timeline"')


def test_a_study_of_this_librarys_decoder_has_no_charts_of_load(tmp_path: Path) -> None:
    assert not {"tpot", "ttft"} & figures_of(_page(tmp_path, workers_study())).keys()
