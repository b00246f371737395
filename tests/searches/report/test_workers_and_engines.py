"""The page of studies of several workers, on several types of devices, and on engines."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from searches.report.html_report import Page, write_page
from searches.report.timeline import timeline
from tests.searches.known import lookup
from tests.searches.report.pages import engine_study, figures_of, workers_study


def _trace(figure: dict[str, Any], name: str) -> dict[str, Any]:
    (trace,) = (trace for trace in figure["data"] if trace["name"] == name)
    return dict(trace)


def _page(folder: Path, study: Any, layers: int = 6) -> str:
    write_page(folder / "report.html", study, Page(layers, 8))
    return (folder / "report.html").read_text(encoding="utf-8")


def test_types_of_devices_are_never_mixed(tmp_path: Path) -> None:
    page = _page(tmp_path, workers_study())
    figures = figures_of(page)
    # The slow type ran trials 0, 1 and 4, at speedups 1.6, 1.2 and 1.4; the fast one trials 2, 3 and 5, at 2.8, 2 and 3.2.
    lines = [trace for trace in figures["history"]["data"] if trace["name"] == "best so far"]
    drawn = {tuple(line["x"]): line["y"] for line in lines}
    assert drawn == {(2, 3, 5): [2.8, 2.8, 3.2], (0, 1, 4): [1.6, 1.6, 1.6]}
    assert len({line["line"]["color"] for line in lines}) == 2
    symbols = {
        number: trace["marker"]["symbol"]
        for trace in figures["history"]["data"]
        if trace["mode"] == "markers"
        for number in trace["x"]
    }
    assert symbols[0] == symbols[1] == symbols[4] != symbols[2] == symbols[3] == symbols[5]
    fronts = [trace for trace in figures["memory"]["data"] if trace["name"] == "Pareto front"]
    assert sorted(front["y"][-1] for front in fronts) == [1.6, 3.2]
    (skips,) = figures["skips"]["data"]
    assert [row[2] for row in skips["z"]] == [2.8, 2.8, 1.4, 1.4]
    assert f"Best so far on fast: {lookup(4).label()}" in page
    assert f"Best so far on slow: {lookup(4).label()}" in page


def test_the_timeline_shows_who_took_over_a_killed_trial(tmp_path: Path) -> None:
    study = workers_study()
    page = _page(tmp_path, study)
    figure = figures_of(page)["timeline"]
    # From the top: those of the fast type, then those of the slow one, by number.
    lanes = [lane.split(" ", 1)[1] for lane in figure["layout"]["yaxis"]["categoryarray"][::-1]]
    assert lanes == ["a", "b 2", "b 10"]
    assert [note["text"] for note in figure["layout"]["annotations"]] == figure["layout"]["yaxis"]["categoryarray"]
    killed, line = _trace(figure, "killed"), _trace(figure, "taken over")
    assert [lane.split(" ", 1)[1] for lane in killed["y"]] == ["b 2"]
    assert [lane and lane.split(" ", 1)[1] for lane in line["y"]] == ["b 2", "b 10", None, "b 10", "a", None]
    minutes = [None if x is None else round(60 * x) for x in line["x"]]
    assert minutes == [70, 300, None, 305, 310, None]
    bars = {name: text for trace in figure["data"] if trace["type"] == "bar" for name, text in [(trace["name"], trace)]}
    assert {name for name in bars if name.startswith("layer skip")} == {
        "layer skip, complete", "layer skip, fail", "layer skip, running",
    }  # fmt: skip
    assert "takes over trial 6" in bars["layer skip, fail"]["hovertext"][0]
    assert "Cross: killed. Dotted: to the trial that took over." in page
    assert "8 trials finished, 1 running" in page


def test_a_study_without_incidents_describes_none(tmp_path: Path) -> None:
    study = engine_study()
    figure = timeline(study.trials[:3], datetime.now().astimezone())
    assert figure is not None
    assert {trace["type"] for trace in figure["data"]} == {"bar"}
    page = _page(tmp_path, study)
    assert "Hatched: the engine failed." in page
    assert not any(word in page.partition("<script>")[0] for word in ("killed", "took over", "interrupted", "unknown device"))


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


def test_a_study_of_this_librarys_decoder_has_no_charts_of_load(tmp_path: Path) -> None:
    assert not {"tpot", "ttft"} & figures_of(_page(tmp_path, workers_study())).keys()
