"""A new kind of drafter is one file that registers itself, and one more file makes it searchable."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from omegaconf import OmegaConf

import searches.space
from layerskip import ConfigError, SpeculativeConfig, Target, config, drafters, generate, load_drafters
from layerskip.config import kinds
from layerskip.drafters import registry
from layerskip.drafters.registry import build_drafter
from searches.app.composition import compose_config
from searches.space import registry as searched
from searches.space.search_space import SearchSpace
from searches.study.finals import Finalist

DRAFTER = '''
"""Drafting the last token again."""

from layerskip.config import Kind
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import BaseDrafter
from layerskip.drafters.registry import register
from layerskip.rules import check_integer


class RepeatLast(BaseDrafter):
    def __init__(self, repeats):
        self.repeats = repeats

    def draft(self, context, limit):
        return Draft(context.last.repeat(min(limit, self.repeats)))


register(
    Kind(
        "repeat_last",
        options={"repeats": 2},
        benchmark={"repeats": 3},
        check=lambda config: check_integer("repeats", config.option("repeats"), 1),
        label=lambda config: f"{config.option('repeats')} times",
    ),
    lambda config, target: RepeatLast(config.option("repeats")),
)
'''

SEARCHED = '''
"""How a trial chooses the repeats of ``repeat_last``."""

from layerskip import SpeculativeConfig
from searches.space.registry import SearchedKind, register


def suggest(choices, trial):
    repeats = trial.suggest_int("repeats", *choices.range("repeats", (1, 4)))
    return SpeculativeConfig("repeat_last", options=(("repeats", repeats),))


register(SearchedKind("repeat_last", suggest, lambda choices, config: {"repeats": config.option("repeats")}))
'''


@pytest.fixture
def _new_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the two files, add their folders to the packages and load them; nothing of them is left after the test."""
    monkeypatch.setattr(config, "_KINDS", dict(config._KINDS))
    monkeypatch.setattr(registry, "_BUILD", dict(registry._BUILD))
    monkeypatch.setattr(searched, "_KINDS", dict(searched._KINDS))
    files = ((drafters, "repeat_last", DRAFTER), (searches.space, "repeat_last", SEARCHED))
    for package, name, source in files:
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    importlib.invalidate_caches()
    load_drafters()
    searched.load_kinds()
    yield
    for package, name, _ in files:
        del sys.modules[f"{package.__name__}.{name}"]
        delattr(package, name)


@pytest.mark.usefixtures("_new_kind")
def test_a_new_drafter_decodes_losslessly(tiny_target: Target) -> None:
    plain = generate(tiny_target, "one two three", max_new_tokens=24)
    for repeats in (1, 3):
        own = SpeculativeConfig.from_dict({"kind": "repeat_last", "repeats": repeats})
        assert build_drafter(own, tiny_target).repeats == repeats  # type: ignore[attr-defined]
        found = generate(tiny_target, "one two three", own, max_new_tokens=24)
        assert found.tokens == plain.tokens
        assert max(r.drafted for r in found.stats.rounds) == repeats


@pytest.mark.usefixtures("_new_kind")
@pytest.mark.parametrize("fields", [{}, {"repeats": 2}, {"repeats": 3}])
def test_a_new_configuration_keeps_its_option(fields: dict[str, int]) -> None:
    own = SpeculativeConfig.from_dict({"kind": "repeat_last"} | fields)
    assert own.to_dict() == {"kind": "repeat_last", "repeats": fields.get("repeats", 2)}
    assert SpeculativeConfig.from_dict(own.to_dict()) == own
    assert own.label() == f"repeat last ({own.option('repeats')} times)"


@pytest.mark.usefixtures("_new_kind")
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": "repeat_last", "repeats": 0}, "repeats"),
        ({"kind": "repeat_last", "ngram_max": 5}, "ngram_max"),
        ({"kind": "prompt_lookup", "repeats": 2}, "repeats"),
    ],
)
def test_a_new_configuration_is_checked(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: "):
        SpeculativeConfig.from_dict(fields)


@pytest.mark.usefixtures("_new_kind")
def test_a_new_kind_is_searched() -> None:
    space = SearchSpace(layers=12)
    assert "repeat_last" in space.available_kinds
    assert "repeat_last" in space.second_kinds  # a cascade may put it after a lookup
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    proposed = [space.suggest(study.ask()) for _ in range(80)]
    own = [each for each in proposed if each.kind == "repeat_last"]
    assert len({each.option("repeats") for each in own}) > 1
    assert any(member.kind == "repeat_last" for each in proposed for member in each.members)
    for each in proposed:
        assert space.suggest(optuna.trial.FixedTrial(space.params(each))) == each
    narrow = SearchSpace(layers=12, kinds=("repeat_last",), ranges={"repeats": (7, 7)})
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    assert {each.option("repeats") for each in (narrow.suggest(study.ask()) for _ in range(8)) if each.kind != "none"} == {7}


@pytest.mark.usefixtures("_new_kind")
def test_a_new_kind_is_a_contender_of_the_benchmark() -> None:
    row = OmegaConf.to_container(compose_config("benchmark").contenders.repeat_last)
    assert row == {"kind": "repeat_last", "repeats": 3}
    assert OmegaConf.to_container(
        compose_config("benchmark", ["contenders.repeat_last.repeats=1"]).contenders.repeat_last
    ) == {
        "kind": "repeat_last",
        "repeats": 1,
    }


@pytest.mark.usefixtures("_new_kind")
def test_a_new_kind_can_win_a_study() -> None:
    known, new = (Finalist(SpeculativeConfig(kind), 1.2, {}, 1.1) for kind in ("prompt_lookup", "repeat_last"))
    assert known.complexity < new.complexity


def test_a_new_kind_is_gone_after_its_test() -> None:
    assert "repeat_last" not in kinds()
    assert "repeat_last" not in searched.all_kinds()
    assert "layerskip.drafters.repeat_last" not in sys.modules
