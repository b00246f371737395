"""A target's own texts, asked for more than once."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from layerskip.own_texts import OwnText
from layerskip.sampling import Sampling
from searches.written import write_texts
from tests.drafters.heads import tiny


def ask(outputs: Path, tokens: int) -> list[OwnText]:
    """Texts of so many tokens."""
    config = {"outputs": str(outputs), "tokens": tokens, "max_new_tokens": 12, "batch": 4, "seed": 0}
    asked = OmegaConf.create(config)
    assert isinstance(asked, DictConfig)
    return write_texts(asked, tiny("llama"), Sampling(1.0))


def said(texts: list[OwnText]) -> int:
    """How many tokens they answer."""
    return sum(len(text.tokens) - text.begin for text in texts)


def test_more_texts_begin_with_those_that_are_kept_and_fewer_are_the_first_of_them(tmp_path: Path) -> None:
    few = ask(tmp_path, 30)
    kept = next((tmp_path / "texts").iterdir()).read_text(encoding="utf-8")
    more = ask(tmp_path, 90)
    assert said(few[:-1]) < 30 <= said(few)
    assert said(more[:-1]) < 90 <= said(more)
    assert more[: len(few)] == few
    (file,) = (tmp_path / "texts").iterdir()
    now = file.read_text(encoding="utf-8")
    assert now.startswith(kept)
    assert len(now.splitlines()) == len(more)
    assert ask(tmp_path, 30) == few
    assert file.read_text(encoding="utf-8") == now
