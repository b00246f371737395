"""Errors in one line."""

from __future__ import annotations

import pytest

from layerskip.device.trial import first_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no\nsuch thing", "no"),
        ("raised:\nLoweringException: no\n\nSet a variable", "raised: LoweringException: no"),
        ("it ends:", "it ends:"),
        ("\n", "ValueError"),
    ],
)
def test_an_error_is_one_line(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line
