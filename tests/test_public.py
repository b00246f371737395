"""The public names."""

from __future__ import annotations

import inspect

import layerskip

PUBLIC = {"load_target", "generate", "measure", "save_draft_checkpoint", "Sampling", "PromptSet", "Measurement"}


def test_all_public_names_exist_and_are_documented_and_all_errors_are_value_errors() -> None:
    """A program can catch ValueError for any invalid input."""
    assert set(layerskip.__all__) >= PUBLIC
    for name in layerskip.__all__:
        value = getattr(layerskip, name)
        assert inspect.getdoc(value), name
        assert not (isinstance(value, type) and issubclass(value, Exception)) or issubclass(value, ValueError)
