"""The configurations that a study tries first, and the comparison of those that need neither a scan nor a cost profile.

Random masks skip half of all layers, and a search that starts from them never recovers. Drafters of the first comparison
share one measurement of plain decoding, so that a study has a leader after a minute. Each becomes a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from layerskip import SpeculativeConfig
from layerskip.config import methods
from layerskip.files import digest
from layerskip.measure.measurement import Sample
from searches.backends.backend import BASELINE, CANDIDATE
from searches.results import ResultLog
from searches.space.search_space import LOOKUP, SearchSpace, structured_masks
from searches.study.bench import Row, resumed_rows
from searches.study.budget import OPENING, Budget
from searches.study.objective import Objective
from searches.workers.pool import Workers

_LOG = "first-{}.jsonl"
_MIN_PROMPTS = 3  # that are measured however long they take


def starting_points(
    space: SearchSpace, proposed: Sequence[SpeculativeConfig] = (), scanned: bool = False
) -> list[SpeculativeConfig]:
    """Return the configurations to try first.

    They are plain decoding, the declared first configurations of each method, the proposals, fastest first, and cascades of
    a lookup with the best of these. Where masks were not scanned, single skips, contiguous runs and sparse masks are tried.
    """
    points = [SpeculativeConfig()]
    for method in space.available_methods:
        starts = space.starts(method)
        paired = space.after_lookup(starts) if methods()[method].paired else []
        points += [*starts[:1], *paired, *starts[1:]]
    for method in dict.fromkeys(config.method for config in proposed):
        own = [config for config in proposed if config.method == method]
        points += [*own[:1], *([] if methods()[method].lookup else space.after_lookup(own)), *own[1:]]
    if "layer_skip" in space.available_methods:
        first, masks = methods()["layer_skip"].first, [*space.masks, *(() if scanned else structured_masks(space))]
        points += [space.nearest("layer_skip", first | {"mask": mask}) for mask in masks]
    if not any(config.method == "cascade" and not config.members[1].head for config in points):
        points += space.after_lookup([config for config in points if config.method in space.second_methods])
    return list(dict.fromkeys(points))


def cheap_arms(space: SearchSpace) -> list[SpeculativeConfig]:
    """Return the usual prompt lookup of a space, and drafters that run no model and pair with it, alone and after it."""
    paired = [method for method in space.available_methods if methods()[method].lookup and methods()[method].paired]
    alone = [space.starts(method)[0] for method in (LOOKUP, *paired) if method in space.available_methods]
    return [*alone, *(cascade for config in alone if config.method in paired for cascade in space.after_lookup([config]))]


def compare_arms(
    arms: Sequence[SpeculativeConfig],
    objective: Objective,
    folder: Path,
    budget: Budget,
    pool: Workers,
    on_prompt: Callable[[], object] = lambda: None,
) -> dict[SpeculativeConfig, list[Row]]:
    """Measure configurations on tune prompts, and return the rows of each, with plain decoding's samples.

    The objective is that of the trials that take the rows. The folder of the study keeps rows as they are measured. The
    budget ends the comparison, after three prompts at least.
    """
    bench, prompts, before, seed = objective.bench, objective.first, objective.warmup, objective.seed
    names = {str(number): config for number, config in enumerate(arms)}
    asked = digest([[config.to_dict() for config in arms], prompts.digest, before.digest, seed, bench.conditions])[:12]

    def work() -> list[dict[str, Any]]:
        log = ResultLog(folder / _LOG.format(asked) if pool.alone else None)
        rows = resumed_rows(partial(bench.compare, names, repeats=1, seed=seed), prompts, log, "0", before)
        found: list[Row] = []
        for item in prompts:
            if f"0 {item.id}" not in log and len(found) >= _MIN_PROMPTS and budget.is_over(OPENING):
                budget.leave_out(OPENING, f"it ended after {len(found)} of {len(prompts)} prompts")
                break
            found.append(next(rows))
            on_prompt()
            budget.save()
        return [{name: sample.to_dict() for name, sample in row.items()} for row in found]

    shared = pool.share(f"first comparison {asked}", work)
    rows = [{name: Sample.from_dict(fields) for name, fields in row.items()} for row in shared]
    return {config: [{BASELINE: row[BASELINE], CANDIDATE: row[name]} for row in rows] for name, config in names.items()}
