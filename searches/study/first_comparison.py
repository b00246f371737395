"""The first comparison of a study: drafters that need neither a scan nor a cost profile, side by side.

They share one measurement of plain decoding, so that a study has a leader after a minute. Each becomes a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from layerskip import PromptSet, SpeculativeConfig
from layerskip.files import digest
from layerskip.measure.measurement import Sample
from searches.app.resume_log import ResultLog
from searches.backends.backend import BASELINE, CANDIDATE
from searches.space import registry
from searches.space.cascade import after_lookup
from searches.space.search_space import SearchSpace
from searches.study.bench import Bench, Row, resumed_rows
from searches.study.budget import OPENING, Budget
from searches.workers.alone import Workers

_LOG = "first-{}.jsonl"
_LEAST_PROMPTS = 3  # that are measured however long they take


def cheap_arms(space: SearchSpace) -> list[SpeculativeConfig]:
    """Return the usual prompt lookup and token recycling of a space, and the cascade of a lookup with the latter."""
    found = {
        kind: list(registry.searched(kind).starts(space))[:1]
        for kind in ("prompt_lookup", "token_recycling")
        if kind in space.available_kinds
    }
    cascades = after_lookup(space, found.get("token_recycling", ()))
    return [*(config for starts in found.values() for config in starts), *cascades]


def compare_arms(
    arms: Sequence[SpeculativeConfig],
    bench: Bench,
    prompts: PromptSet,
    before: PromptSet,
    seed: int,
    folder: Path,
    budget: Budget,
    crew: Workers,
    on_prompt: Callable[[], object] = lambda: None,
) -> dict[SpeculativeConfig, list[Row]]:
    """Measure configurations on tune prompts, and return the rows of each, with plain decoding's samples.

    Args:
        arms: the configurations.
        bench: measures them.
        prompts: that each decodes.
        before: prompts that drafters which learn decode first, unmeasured.
        seed: of the study.
        folder: of the study, which keeps rows as they are measured.
        budget: ends the comparison, after three prompts at least.
        crew: the workers that share the rows.
        on_prompt: called after each prompt.
    """
    names = {str(number): config for number, config in enumerate(arms)}
    asked = digest([[config.to_dict() for config in arms], prompts.digest, before.digest, seed, bench.conditions])[:12]

    def work() -> list[dict[str, Any]]:
        log = ResultLog(folder / _LOG.format(asked) if crew.alone else None)
        rows = resumed_rows(bench, names, prompts, seed, log, "0", before=before)
        found: list[Row] = []
        for item in prompts:
            if f"0 {item.id}" not in log and len(found) >= _LEAST_PROMPTS and budget.is_over(OPENING):
                budget.leave_out(OPENING, f"it ended after {len(found)} of {len(prompts)} prompts")
                break
            found.append(next(rows))
            on_prompt()
            budget.save()
        return [{name: sample.to_dict() for name, sample in row.items()} for row in found]

    shared = crew.share(f"first comparison {asked}", work)
    rows = [{name: Sample.from_dict(fields) for name, fields in row.items()} for row in shared]
    return {config: [{BASELINE: row[BASELINE], CANDIDATE: row[name]} for row in rows] for name, config in names.items()}
