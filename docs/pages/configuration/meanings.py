"""What the fields of the configuration mean: docstrings of the types behind them, and texts where there is none."""

from __future__ import annotations

import inspect
import re

from hydra.utils import get_object

TYPES = {
    "target": "layerskip.load_target",
    "sampling": "layerskip.Sampling",
    "space": "searches.space.search_space.SearchSpace",
    "measure": "searches.study.objective.MeasureSettings",
    "scan": "searches.predict.preparation.ScanSettings",
    "scan.proposals": "searches.predict.proposals.ProposalSettings",
    "bridging": "searches.training.bridge_settings.BridgingSettings",
    "study": "searches.study.study.StudySettings",
}
"""The type behind each part of the configuration."""

MEANINGS = {
    "seed": "seed of everything that is drawn",
    "outputs": "folder of everything that is written",
    "target.path": "with `target=local`: a folder or a `.gguf` file; never looked up on the hub",
    "prompts.path": "with `prompts=jsonl`: a JSON Lines file, one prompt per line",
    "sampler.n_startup_trials": "trials before the sampler uses the results of earlier ones; with `gp`, per kind of drafter",
    "sampler.multivariate": "with `tpe`: true models all parameters together; false each by itself",
    "sampler.group": "with `tpe`: true models the parameters of each kind of drafter as a group of their own",
    "sampler.warn_independent_sampling": "with `cmaes`: whether Optuna warns about parameters that CMA-ES cannot sample",
    "sampler.population_size": "with `nsga2`: trials per generation",
    "pruner.p_threshold": "a trial is stopped when the test that it is slower than the leader gives a p-value below this",
    "pruner.n_startup_steps": "prompts that a trial and the leader must share before it can be stopped",
    "tracking.uri": "an MLflow server, such as `http://localhost:5000`; null: SQLite in the outputs folder",
    "tracking.experiment": "name of the MLflow experiment",
    "coverage.configs.layer_skip.*": "a configuration whose intervals are tested; see [drafters](#drafters)",
    "coverage.configs.prompt_lookup.*": "a second one",
    "drafter.*": "what is trained, `drafter=eagle`, `drafter=medusa` or `drafter=layer_skip`; see [drafters](#drafters)",
}
"""Meanings that stand neither in a docstring nor in a comment of ``conf/``."""


def arguments(docstring: str | None) -> dict[str, str]:
    """The descriptions in the ``Args`` section of a docstring, by name."""
    section = re.search(r"Args:\n(.*?)(\n\s*\n|\Z)", inspect.cleandoc(docstring or ""), re.S)
    found: dict[str, str] = {}
    name = ""
    for line in (section[1] if section else "").splitlines():
        if match := re.match(r" {4}(\w+): (.*)", line):
            name = match[1]
            found[name] = match[2]
        elif name:
            found[name] += " " + line.strip()
    for name, text in found.items():
        if match := re.fullmatch(r"see :class:`~?([\w.]+)`\.?", text):  # the same argument of another class
            text = arguments(inspect.getdoc(get_object(match[1])))[name]
        found[name] = plain(text)
    return found


def plain(text: str) -> str:
    """A description as Markdown, without references to Python objects."""
    text = re.sub(r" \(:\w+:`[^`]*`\)", "", text)
    text = re.sub(r":\w+:`~?([\w.]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    return re.sub(r"\bNone\b", "null", text).replace("``", "`").replace("|", "\\|").rstrip(".")


def descriptions(path: str) -> dict[str, str]:
    """What the fields of a type mean, from its docstring and from those of the types that it inherits from."""
    made = get_object(path)
    found: dict[str, str] = {}
    for one in reversed(getattr(made, "__mro__", (made,))):
        found |= arguments(inspect.getdoc(one))
    return found


def inherited(name: str) -> str:
    """What a field means whose name ends like one of a known part, such as ``planted.search.measure.prompts``."""
    part, _, field = name.rpartition(".")
    known = next((one for one in sorted(TYPES, key=len, reverse=True) if part == one or part.endswith(f".{one}")), None)
    return descriptions(TYPES[known]).get(field, "") if known else ""
