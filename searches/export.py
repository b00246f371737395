"""The commands and files by which other inference engines run an export.

Usage: ``python -m searches.export outputs/<study>/best.json [engine=vllm] [model=FOLDER] [draft=FOLDER]``

``engine=`` prints the commands of one engine, which a shell runs as they are; without it a table of all engines is printed.
``model=`` writes the target as a folder, and ``draft=`` what drafts for it: a draft model, the layers that a plan keeps, at
its bits for vLLM and SGLang, or a trained head in the layout of the engine.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from layerskip import DraftPlan, Export, SpeculativeConfig, Target, save_draft_checkpoint
from layerskip.config import methods
from layerskip.engines.registry import ENGINES, LOADS_FORMATS
from layerskip.heads.folders import save_portable
from layerskip.models.loading import load_draft
from searches.app.application import run
from searches.app.checks import InputError, check_folder
from searches.app.targets import command_line, load_exported_target


def export(config: DictConfig) -> None:
    """Print the commands of an export's engines, or write its model or draft; see ``conf/export.yaml``.

    Raises:
        InputError: the engine is unknown or cannot run the configuration, or a folder is not empty.
    """
    if OmegaConf.is_missing(config, "export"):
        raise InputError("export: is missing; name the file, as in python -m searches.export best.json")
    loaded = Export.load(str(config.export))
    if config.engine is not None and config.engine not in ENGINES:
        raise InputError(f"engine: {config.engine!r} is not one of {', '.join(ENGINES)}")
    if config.model is None and config.draft is None:
        engines = loaded.engines(str(config.export))
        print(_table(engines) if config.engine is None else script(config.engine, engines[config.engine]))
        return
    if config.draft is not None and config.engine is not None:
        script(config.engine, loaded.engines(str(config.export))[config.engine])  # refuses what the engine cannot run
    folders = {name: _empty(name, str(config[name])) for name in ("model", "draft") if config[name] is not None}
    target = load_exported_target(config.target, loaded)
    loaded.check(target)
    if "model" in folders:
        target.save(folders["model"])
    if "draft" in folders:
        _save_draft(loaded.config, target, folders["draft"], config.engine or "vllm")
    for folder in folders.values():
        print(f"wrote {folder}")


def _table(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of engines in Markdown: their method, and what each does otherwise or why it cannot run the export."""
    lines = ["| engine | documentation | drafts by | differs |", "|---|---|---|---|"]
    for name, entry in engines.items():
        method = entry.get("method", "-")
        note = entry.get("reason") or "; ".join(entry.get("differs", ())) or "-"
        lines.append(f"| {name} | {entry['version']} | {method} | {note} |")
    return "\n".join([*lines, "", "engine=NAME prints the commands of one."])


def script(name: str, entry: Mapping[str, Any]) -> str:
    """Return the commands that start an engine, one a line, and the call of an engine that is a library.

    Raises:
        InputError: the engine cannot run the export.
    """
    if "reason" in entry:
        raise InputError(f"engine: {name} cannot run this export: {entry['reason']}")
    notes = [f"differs: {note}" for note in entry.get("differs", ())]
    if entry.get("request"):
        notes.append("each request: " + ", ".join(f"{field}={value!r}" for field, value in entry["request"].items()))
    lines = [line for note in notes for line in textwrap.wrap(note, 120, initial_indent="# ", subsequent_indent="#   ")]
    lines += [shlex.join(words) for words in entry.get("prepare", ())]
    if "command" in entry:
        lines.append(shlex.join(entry["command"]))
    else:
        lines += ["python - <<'END'", 'prompt = "Why is the sky blue?"', entry["call"], "END"]
    return "\n".join(lines)


def _save_draft(config: SpeculativeConfig, target: Target, folder: Path, engine: str) -> None:
    """Write what drafts, as an engine loads it; of a cascade, the member with a model of its own."""
    for part in (config, *config.members):
        if methods()[part.method].plan_field:
            plan = DraftPlan.parse(part.plan, target.layers)
            save_draft_checkpoint(target, plan if engine in LOADS_FORMATS else plan.without_formats(), folder)
        elif part.draft_model:
            load_draft(target, part.draft_model, part.method != "cross_tokenizer").save(folder)
        elif part.head:
            save_portable(Path(part.head), folder, target, engine)
        else:
            continue
        return
    raise InputError(f"draft: {config.label()} has no draft that an engine could load")


def _empty(name: str, folder: str) -> Path:
    check_folder(name, folder)
    if Path(folder).exists() and any(Path(folder).iterdir()):
        raise InputError(f"{name}: {folder} is not empty")
    return Path(folder)


if __name__ == "__main__":
    sys.argv[1:] = command_line(sys.argv[1:])
    run("export", export, resumable=False, is_printed=True)
