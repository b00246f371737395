"""A new method is one file: everything else that lists methods is derived from what it declares."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from omegaconf import OmegaConf

from layerskip import ConfigError, SpeculativeConfig, Target, config, drafters, generate, load_drafters
from layerskip.config import Field, Method, declare, shared
from layerskip.decoding import drafter as base
from layerskip.engines.deployment import Deployment, Unsupported
from searches.app.composition import compose_config
from searches.report.charts import legend
from searches.space.search_space import SearchSpace
from searches.study.starting_points import starting_points
from searches.study.study import with_stored_methods
from searches.tracking.runs import parameters
from tests.searches.known import measured_trial

DRAFTER = '''
"""Drafting the last token again."""

from layerskip.config import Field, Method
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Drafter


class RepeatLast(Drafter):
    """A drafter that repeats the last token."""

    method = Method(
        "repeat_last",
        (Field("repeats", 2, "how often the last token is repeated", range=(1, 4), first=3),),
        source="the last token",
        rank=1,
        color="#123456",
        label=lambda config: f"{config.value('repeats')} times",
    )

    def __init__(self, repeats):
        self.repeats = repeats

    def draft(self, context, limit):
        return Draft(context.last.repeat(min(limit, self.repeats)))
'''


@pytest.fixture
def _new_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the file, add its folder to the package and load it; nothing of it is left after the test."""
    monkeypatch.setattr(config, "_METHODS", dict(config._METHODS))
    monkeypatch.setattr(base, "_CLASSES", dict(base._CLASSES))
    (tmp_path / "repeat_last.py").write_text(DRAFTER, encoding="utf-8")
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    load_drafters()
    yield
    del sys.modules["layerskip.drafters.repeat_last"]
    delattr(drafters, "repeat_last")


def _of(**fields: object) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict({"method": "repeat_last"} | fields)


@pytest.mark.usefixtures("_new_method")
def test_a_new_drafter_decodes_losslessly_and_has_its_own_field(tiny_target: Target) -> None:
    plain = generate(tiny_target, "one two three", max_new_tokens=24)
    for own, repeats in ((_of(), 2), (_of(repeats=3), 3)):
        assert own.to_dict() == {"method": "repeat_last", "repeats": repeats}
        assert SpeculativeConfig.from_dict(own.to_dict()) == own
        assert own.label() == f"repeat last ({repeats} times)"
        found = generate(tiny_target, "one two three", own, max_new_tokens=24)
        assert found.tokens == plain.tokens
        assert max(r.drafted for r in found.stats.rounds) == repeats
    for fields, named in (
        ({"method": "repeat_last", "repeats": 0}, "repeats"),
        ({"method": "repeat_last", "prompt_lookup_max": 5}, "prompt_lookup_max"),
        ({"method": "prompt_lookup", "repeats": 2}, "repeats"),
    ):
        with pytest.raises(ConfigError, match=f"^{named}: "):
            SpeculativeConfig.from_dict(fields)


@pytest.mark.usefixtures("_new_method")
def test_a_new_method_is_searched() -> None:
    space = SearchSpace(layers=12)
    assert "repeat_last" in space.available_methods
    assert "repeat_last" in space.second_methods  # a cascade may put it after a lookup
    assert _of(repeats=3) in starting_points(space)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    proposed = [space.suggest(study.ask()) for _ in range(80)]
    own = [each for each in proposed if each.method == "repeat_last"]
    assert len({each.value("repeats") for each in own}) > 1
    study.enqueue_trial(space.params(_of(repeats=3)))
    assert space.suggest(study.ask()) == _of(repeats=3)
    assert any(member.method == "repeat_last" for each in proposed for member in each.members)
    composed = compose_config("layerskip", ["space.ranges.repeat_last.repeats=[7,7]"])
    narrow = SearchSpace(layers=12, methods=("repeat_last",), ranges=composed.space.ranges)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    suggested = [narrow.suggest(study.ask()) for _ in range(8)]
    assert {each.value("repeats") for each in suggested if each.method != "none"} == {7}


def test_a_study_that_began_without_a_method_resumes_with_it(request: pytest.FixtureRequest) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    before = SearchSpace(layers=12)
    stored = before.available_methods
    for _ in range(20):
        before.suggest(study.ask())
    request.getfixturevalue("_new_method")
    space = with_stored_methods(SearchSpace(layers=12), study)
    assert space.available_methods == stored
    found = {space.suggest(study.ask()).method for _ in range(60)}
    assert "cascade" in found and "repeat_last" not in found


@pytest.mark.usefixtures("_new_method")
def test_everything_that_lists_methods_has_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark, charts, tables and documentation; no engine has a method that names no method of engines."""
    chosen = compose_config("benchmark", ["contenders.repeat_last.repeats=1"]).contenders.repeat_last
    for row, repeats in ((compose_config("benchmark").contenders.repeat_last, 3), (chosen, 1)):
        assert OmegaConf.to_container(row) == {"method": "repeat_last", "repeats": repeats}
    assert legend([measured_trial(_of(), {"x": 1.0})]) == {"repeat last": "#123456"}
    assert parameters(_of(repeats=4))["drafter"] == "repeat_las"
    monkeypatch.syspath_prepend(str(Path(drafters.__path__[0]).parents[1] / "docs"))
    page = importlib.import_module("build_configuration")
    declared = ["[`repeat_last`](drafters.md#repeat_last)", "the last token", "`repeats` 1 to 4 (3)"]
    assert declared in list(page.drafter_rows())
    assert page.drafter_fields()["repeats"] == ("2", "how often the last token is repeated")
    with pytest.raises(Unsupported, match=r"^config\.method: repeat_last: no engine knows it"):
        Deployment({"layers": 2}, _of()).way()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: declare(Method("prompt_lookup")), "prompt_lookup is declared twice"),
        (lambda: Method("new", (Field("method", "", "taken"),)), r"new\.method: is declared twice"),
        (lambda: Method("new", (Field("num_speculative_tokens", 9, "more"),)), "has another default"),
        (lambda: Method("new.one"), "are not all names"),
        (lambda: Method("new", (shared("prompt_lookup_max"), shared("prompt_lookup_min"))), "follows prompt_lookup_min"),
    ],
)
def test_contradictory_declarations_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
