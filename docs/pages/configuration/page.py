"""The page of the configuration: its introduction, and the tables in their order."""

from __future__ import annotations

from pages.configuration.tables import CONF, PART_ROWS, drafter_field_rows, drafter_rows, program_rows, shared
from pages.markdown import table

HEAD = ("field", "default", "meaning")

INTRODUCTION = """\
# Configuration

This page is generated: `.venv/bin/python docs/build_configuration.py`.

Every program is a [Hydra](https://hydra.cc) application. `group=choice` picks a file of `conf/<group>/`, and `field=value`
overrides one field:

```bash
.venv/bin/python -m searches.layerskip experiment=smoke study.n_trials=12 space.kinds=[none,prompt_lookup] --cfg job
```

`--cfg job` prints the fields that `conf/` lists instead of running the program; most users need no others. All
other fields below have their defaults in code and are overridden in the same way, for example `space.window=[1,4]`. A study
logs its complete configuration to MLflow as `config.yaml`. A row `name.*` stands for all fields below `name`.
"""


def page() -> list[str]:
    """The lines of the page."""
    lines = [INTRODUCTION, "## The study: `python -m searches.layerskip`", "", *table(HEAD, program_rows("layerskip"))]
    for part in (*PART_ROWS, "experiment"):
        choices = ", ".join(f"`{part}={path.stem}`" for path in sorted((CONF / part).glob("*.yaml")))
        lines += ["", f"### `{part}`", "", f"Choices: {choices}." if choices else ""]
        lines += ["", *table(HEAD, PART_ROWS[part](part))] if part in PART_ROWS else []
    lines += ["", "## Drafters", "", *table(("kind", "fields", "benchmark's defaults"), drafter_rows())]
    lines += ["", *table(HEAD, drafter_field_rows()), "", "## Other programs"]
    for path in sorted(CONF.glob("*.yaml")):
        if path.stem != "layerskip":
            evaluates = (CONF.parent / "searches" / "evaluate" / path.name).with_suffix(".py").exists()
            program = f"evaluate.{path.stem}" if evaluates else path.stem
            lines += ["", f"### `python -m searches.{program}`", "", *shared(path.stem)]
            lines += ["", *table(HEAD, program_rows(path.stem))]
    return lines
