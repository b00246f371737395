"""docs/configuration.md lists every field of the configuration, and is up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig

from searches.app.composition import compose_config

REPOSITORY = Path(__file__).parents[2]
PARTS = ("target", "sampling", "space", "measure", "scan", "bridging", "study")


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, "docs/build_configuration.py", "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_describes_every_field() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            _, name, _, meaning, *_ = map(str.strip, line.split("|"))
            rows.setdefault(name, meaning)

    def check(node: DictConfig, prefix: str) -> None:
        for name in node:
            if isinstance(child := node._get_node(name), DictConfig) and child:
                check(child, f"{prefix}.{name}")
            elif name != "_target_":
                assert rows[f"`{prefix}.{name}`"], f"{prefix}.{name} has no description"

    config = compose_config("layerskip")
    for part in PARTS:
        check(config[part], part)
