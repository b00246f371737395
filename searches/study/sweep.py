"""The search for a target's fastest lossless decoding, from the composed configuration to the export."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import torch
from hydra.utils import instantiate
from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT, MLFLOW_SOURCE_NAME, MLFLOW_SOURCE_TYPE
from omegaconf import DictConfig

from layerskip import SpeculativeConfig, UnsupportedModel
from layerskip.device.memory import within_memory
from layerskip.device.trial import first_line
from layerskip.export import attachment_digests
from layerskip.files import digest, read_json, write_json
from layerskip.measure.measure import Task
from layerskip.measure.measurement import MIN_RESAMPLED
from layerskip.models.environment import environment
from searches.app.application import instantiate_part
from searches.app.checks import InputError, check_folder
from searches.app.interrupt import is_interrupt
from searches.backends.backend import BackendError, Row
from searches.backends.selection import closing
from searches.engines.peer import engine_version
from searches.engines.race import RACE_FILE, SCHEMA, Race, race
from searches.predict.mask_search import SearchControl
from searches.predict.preparation import Preparation
from searches.predict.proposals import propose_all
from searches.predict.scan_predictor import ScanPredictor
from searches.progress import Progress, say
from searches.results import record_header
from searches.space.search_space import SearchSpace
from searches.study import machine
from searches.study.bench import ModelBench
from searches.study.budget import FINALS, OPENING, PREDICTIONS, TRIALS, Budget
from searches.study.finals import Finals, RunControl, measure_finals
from searches.study.leaderboard import leader_line, leaderboard, leading, trial_line
from searches.study.objective import Objective
from searches.study.plan import Plan, default_name, describe
from searches.study.pruning import BoundEstimator
from searches.study.starting_points import cheap_arms, compare_arms, starting_points
from searches.study.storage import composed, connect, device_type, is_exported, joined, share_finals
from searches.study.study import (
    STUDY_ID,
    StudySettings,
    finished,
    open_study,
    requeue_unfinished,
    run_trials,
    wait_for_trials,
    with_stored_methods,
)
from searches.tracking.tracker import Tracker
from searches.workers.pool import Workers

_RACED_PROMPTS = 16  # held-out prompts that engines decode
_THREADS = "threads"
"""User attribute of a study: the number of threads of the processor."""


@dataclass(frozen=True)
class Reports:
    """What shows a study. The command passes it in, because reports read studies, and studies know no report.

    ``view`` makes a :class:`searches.report.page.LiveView`, ``publisher`` a :class:`searches.report.publish.Publisher`.
    """

    view: Callable[..., Any]
    publisher: Callable[..., Any]
    summary: Callable[[optuna.Study, Finals | None], str]


def search(config: DictConfig, reports: Reports) -> Finals:
    """Run or continue a composed study to its end and return the verdict; Ctrl-C prints a summary of the finished trials."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    settings: StudySettings = instantiate(config.study)
    with Progress(settings.max_seconds) as progress, _opened_sweep(config, progress, reports) as sweep, sweep.view.closing():
        try:
            sweep.compare_arms()
            predictor, starts = sweep.predict()
            sweep.run_trials(predictor, starts)
            return sweep.finish(predictor)
        except BaseException as error:
            if is_interrupt(error):
                say(reports.summary(sweep.study, None))
            raise


@contextlib.contextmanager
def _opened_sweep(config: DictConfig, progress: Progress, reports: Reports) -> Iterator[Sweep]:
    """Open or resume everything that a study needs, and close it at the end."""
    say("loading the model")
    pruner = instantiate_part(config, "pruner")
    instantiate_part(config, "sampler", seed=0)  # refuse a bad one before anything is written
    plan = Plan.of(config)
    settings = describe(config, plan.target, plan.prompts, plan.backend)
    device, name = device_type(plan.target), plan.settings.name or default_name(config, settings)
    folder, worker = plan.outputs / name, config.get("worker")
    check_folder("study.name", str(folder))
    database, tracker = connect(config, plan.settings.storage)
    with joined(name, folder, worker, device, database) as (storage, pool):
        with pool.claim("opening"):
            study = open_study(name, storage, pruner, settings)
            # A resumed study keeps its number, and workers of one machine share its cores.
            wanted = plan.settings.threads or (study.user_attrs.get(_THREADS) if pool.alone else None)
            measured = wanted is not None or worker is None
            if measured and (chosen := machine.set_threads(plan.target, wanted)) is not None:
                say(chosen)
            if pool.alone:
                study.set_user_attr(_THREADS, torch.get_num_threads())
            say(machine.describe(plan.target, str(config.target.get("dtype", "auto"))))
            if plan.target.device.type == "cpu" and (busy := machine.busy_line()) is not None:
                say(busy)
            tags = environment(plan.target) | {"prompts_digest": plan.prompts.digest, "backend": plan.backend.name}
            tags |= {MLFLOW_SOURCE_NAME: "python -m searches.layerskip", MLFLOW_SOURCE_TYPE: "LOCAL"}
            if tags["git_commit"] is not None:
                tags[MLFLOW_GIT_COMMIT] = tags["git_commit"]
            identity, texts = str(study.user_attrs[STUDY_ID]), {"config.yaml": composed(config)}
            tracker.open_study(name, identity, settings, tags, prompts=plan.prompts, texts=texts)
            budget = Budget(study, plan.settings.max_seconds, progress.started, pool.leads())
            budget.save()  # for workers that open it from now on
            progress.started = budget.started
        # A resumed sampler must not repeat its earlier draws, nor those of other workers.
        study.sampler = instantiate_part(config, "sampler", seed=config.seed + len(study.trials) + pool.seed)
        plan = replace(plan, space=with_stored_methods(plan.space, study))
        with tracker.closing(pool.leave, pool.name), closing(plan.backend):
            yield Sweep(plan, study, tracker, folder, pool, progress, budget, reports)


@dataclass(eq=False)
class Sweep:
    """The steps of one study, which is open."""

    plan: Plan
    study: optuna.Study
    tracker: Tracker
    folder: Path
    pool: Workers
    progress: Progress
    budget: Budget
    reports: Reports

    def __post_init__(self) -> None:
        plan, study, folder = self.plan, self.study, self.folder
        self.tune, held_out = plan.prompts.split()
        self.held_out = held_out.take(plan.measuring.held_out_prompts)
        self.first_prompt = plan.seed * (plan.measuring.prompts or 0)  # another seed searches on other tune prompts
        self.bench = ModelBench(plan.backend, plan.sampling, plan.measuring.max_new_tokens, plan.workload)
        self.view = self.reports.view(study, folder, plan.settings.n_trials, self.pool)
        self.publisher = self.reports.publisher(plan, study, self.tracker, folder)
        self._exported: tuple[int | None, str | None] | None = None  # trial of the exported leader, None for plain; run

    def compare_arms(self) -> None:
        """Compare the drafters that need no preparation, whose trials are the study's first."""
        study, plan = self.study, self.plan
        requeue_unfinished(study, self.pool)
        if self.pool.alone:
            self.tracker.reconcile(finished(study))
        say(f"study {study.study_name}: {len(finished(study))} of {plan.settings.n_trials} trials are finished")
        if len(self.held_out) < MIN_RESAMPLED:
            say(
                f"prompts: {len(self.held_out)} held-out prompts cannot show that anything is faster than plain decoding: "
                f"{MIN_RESAMPLED} are the least"
            )
        self._begin(OPENING)
        with self.budget.preparing(self.pool):
            self.space = self._measured_space()
            self.arms = cheap_arms(self.space)[: plan.settings.n_trials]
            objective = self._objective(None)
            if len(self.arms) > len(finished(study)):
                objective.compared = self._compared(objective)
        if self.arms:
            self._run_trials(objective, len(self.arms), self.arms)
        elif self.pool.leads():
            self._export_leader()  # no drafting

    def _compared(self, objective: Objective) -> dict[SpeculativeConfig, list[Row]]:
        """Return the rows of the first comparison; none if one of them cannot be run beside the others."""
        with self.progress.counting(len(objective.first), "prompts") as count:
            after = self.view.after(count)
            try:
                found = within_memory(lambda: compare_arms(self.arms, objective, self.folder, self.budget, self.pool, after))
            except BackendError as error:
                say(f"{OPENING}: {error.reason}; each is measured by itself")
                return {}
        return found or {}

    def predict(self) -> tuple[ScanPredictor | None, Sequence[SpeculativeConfig]]:
        """Scan masks, if layer skipping is searched; return their predictor and the configurations to try first."""
        self._begin(PREDICTIONS)
        self.budget.begin(PREDICTIONS)
        with self.budget.preparing(self.pool):
            predictor = self._prepare_predictor()
            self.space = replace(self.space, plans=predictor is not None and bool(predictor.profile.shares))
            proposed = self._propose(predictor)
            starts = [*self.arms, *starting_points(self.space, proposed, predictor is not None)]
        self.budget.save()
        self.view.singles = None if predictor is None else predictor.single_agreements()
        return predictor, starts

    def run_trials(self, predictor: ScanPredictor | None, starts: Sequence[SpeculativeConfig]) -> None:
        """Run trials until the study has enough, or its share of the budget ends."""
        self._begin(TRIALS)
        self.budget.begin(TRIALS)
        wanted = self.plan.settings.n_trials
        objective = self._objective(None if predictor is None else BoundEstimator(predictor))
        until = self._run_trials(objective, wanted, starts, partial(self.budget.left, TRIALS))
        if until and (done := len(finished(self.study))) < wanted:
            self.budget.leave_out(TRIALS, f"{done} of {wanted} ran {until}")

    def _objective(self, bounds: BoundEstimator | None) -> Objective:
        plan, refresh = self.plan, self.view.refresh
        return Objective(self.bench, self.space, self.tune, plan.measuring, plan.seed, refresh, bounds, self.first_prompt)

    def _run_trials(
        self,
        objective: Objective,
        wanted: int,
        starts: Sequence[SpeculativeConfig],
        seconds_left: Callable[[], float] = lambda: math.inf,
    ) -> str:
        """Run trials until the study has a number of finished ones; return until when, if there are fewer."""
        study, settings = self.study, replace(self.plan.settings, n_trials=wanted)
        with self.progress.counting(wanted, "trials", len(finished(study))) as count:

            def on_trial(trial: optuna.trial.FrozenTrial) -> None:
                count()
                self.tracker.record(trial)
                if self.pool.leads():
                    self._export_leader()
                else:
                    self._exported = None  # another worker exports
                self.view.refresh()
                self.progress.step(trial_line(trial))
                self.budget.save()

            return run_trials(study, objective, settings, on_trial, starts, self.pool, seconds_left)

    def _export_leader(self) -> None:
        """Export the leader provisionally, if it is another one, and name it in the progress."""
        leader, path = leading(self.study), self.folder / "best.json"
        now = None if leader is None else leader.number, self.tracker.run_id
        if now == self._exported and path.exists():
            return
        self._exported = now
        if self.publisher.publish_provisional(self.tune, self.budget.spent) and not self.progress.leader:
            say(f"wrote {path}, provisional until the finals")
        self.progress.leader = leader_line(self.study)

    def _begin(self, stage: str, is_alone: bool = False) -> None:
        self.progress.begin(stage)
        self.view.begin(stage, is_alone)

    def finish(self, predictor: ScanPredictor | None) -> Finals:
        """Measure the finalists and publish the results, which one of the workers does; return the results."""
        study, pool = self.study, self.pool
        wait_for_trials(study, pool)
        trials = finished(study)
        publish = partial(self.publisher.publish, predictor=predictor, held_out=self.held_out)

        def work(check: Callable[[], None]) -> Finals:
            finals = self._measure_finalists(check)
            publish(finals)
            return finals

        finals = share_finals(pool, trials, work)
        if not is_exported(self.folder / "best.json", study.study_name, len(trials)):  # another file system has it
            publish(finals)
        elif not pool.alone:  # another worker may have printed them
            say(f"the results are in {self.folder / 'report.md'}")
        if (measured := self._race_engines(finals)) is not None and pool.leads():
            publish(finals, race=measured)
        with pool.claim("mirror"):  # all workers have written the runs of their trials
            self.tracker.reconcile(trials)
            self.publisher.log(finals, again=pool.leads())
        return finals

    def _measure_finalists(self, check: Callable[[], None]) -> Finals:
        measuring = self.plan.measuring
        self._begin(FINALS, is_alone=True)
        maximum = len(self.held_out) * measuring.held_out_repeats
        with self.progress.counting(maximum, "held-out prompts") as count:

            def on_prompt() -> None:
                check()
                count()
                self.view.refresh()
                self.budget.save()

            control = RunControl(self.folder, on_prompt, partial(self.budget.left, FINALS))
            return measure_finals(self.study, self.bench, self.held_out, measuring, self.plan.seed, control)

    def _race_engines(self, finals: Finals) -> Race | None:
        """Measure the chosen engines beside the winner, in one of the workers; an engine's fault ends no study."""
        plan, winner, path = self.plan, finals.winner.config, self.folder / RACE_FILE
        if not plan.engines:
            return None
        prompts, tokens = self.held_out.take(_RACED_PROMPTS), plan.measuring.max_new_tokens
        halves = self.tune.take(plan.measuring.prompts, self.first_prompt), prompts
        digests, drafts = [half.digest for half in halves], plan.space.values("draft_model", "draft_model")
        ours = [winner.to_dict(), attachment_digests(winner), self.bench.conditions]
        asked = digest([SCHEMA, ours, plan.engines, drafts, digests, tokens])

        def work() -> dict[str, Any]:
            stored = read_json(path)
            if stored is not None and stored["asked"] == asked and not stored["race"]["left_out"]:
                return dict(stored["race"])
            start = time.monotonic()
            self._begin(path.stem, is_alone=True)
            with self.progress.counting(len(prompts), "held-out prompts") as count:
                task, folder = Task(plan.sampling, tokens, plan.seed), plan.outputs / path.stem
                found = race(plan.target, winner, plan.engines, halves, task, folder, drafts, count).to_dict()
            header = record_header(SCHEMA, plan.target) | {
                "engine_versions": {engine: engine_version(engine) for engine in plan.engines},
                "sampling": plan.sampling.to_dict(),
                "read_gigabytes_per_second": machine.read_gigabytes_per_second(plan.target.device),
                "prompts": {"name": prompts.name, "count": len(prompts), "digest": prompts.digest},
                "max_new_tokens": tokens,
                "seconds": time.monotonic() - start,
            }
            write_json(path, header | {"asked": asked, "race": found})
            return found

        try:
            return Race.from_dict(self.pool.share(f"race {asked[:16]}", work))
        except (UnsupportedModel, InputError, OSError, MemoryError) as error:
            say(f"engines: {first_line(error)}")
            return None

    def _prepare_predictor(self) -> ScanPredictor | None:
        plan = self.plan
        if not plan.scanning.enabled or not self.space.scanned:
            return None
        prompts = self.tune.take(plan.scanning.prompts, self.first_prompt)
        is_over = partial(self.budget.is_over, PREDICTIONS)
        preparation = Preparation(plan.target, plan.sampling, plan.outputs, self.budget.use, self.pool, is_over)
        new_tokens = plan.measuring.max_new_tokens
        predictor = preparation.predictor(prompts, new_tokens, self.space, plan.scanning, self.folder, plan.seed)
        if predictor is None:
            say("scan: no predictions; every trial is decoded")
        return predictor

    def _propose(self, predictor: ScanPredictor | None) -> list[SpeculativeConfig]:
        if predictor is None:
            return []
        settings = self.plan.scanning.proposals
        leader = leaderboard(self.study).leader
        to_beat = 0.0 if leader is None else max(1.0, leader.speedup)
        is_over, leave_out = partial(self.budget.is_over, PREDICTIONS), partial(self.budget.leave_out, PREDICTIONS)
        with self.progress.counting(settings.budget(self.space) * len(self.space.scanned), "draft plans") as count:
            control = SearchControl(is_over, to_beat, leave_out, on_mask=self.view.after(count))
            return propose_all(predictor, self.space, settings, control)

    def _measured_space(self) -> SearchSpace:
        """Return the space with windows for long contexts only, and the costs by which cascades choose."""
        plan, study = self.plan, self.study
        lengths = (len(plan.target.encode(item.messages())) for item in self.tune)
        context = round(statistics.median(lengths) + plan.measuring.max_new_tokens / 2)
        # On a GPU, passes over a window are not captured.
        space = plan.space.at_context(context if plan.target.device.type == "cpu" else 0)
        if "cascade" not in space.available_methods:
            return space
        timer = machine.CostTimer(plan.target, plan.sampling, context, plan.seed)
        claim = partial(self.pool.claim, "costs")
        with claim():
            costs = machine.verify_cost(study, timer.verify_costs)
            drafting = machine.draft_cost(study, timer.draft_costs, claim) if costs else None
        return replace(space, verify_cost=costs, draft_cost=drafting)
