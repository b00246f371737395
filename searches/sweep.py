"""The search for a target's fastest lossless decoding, from the composed configuration to the export.

Run with ``python -m searches.layerskip`` and Hydra overrides. The same command resumes a study that was interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import optuna
from omegaconf import DictConfig
from tqdm import tqdm

from layerskip import SpeculativeConfig
from layerskip.measure.measurement import LEAST_RESAMPLED
from layerskip.models.environment import environment
from layerskip.rules import contexts_of
from searches.app.application import instantiate_part
from searches.app.interrupt import is_interrupt
from searches.app.time_ledger import FITS, SHARED, TimeLedger, recorded_seconds
from searches.backends.selection import closing
from searches.predict.preparation import prepare_predictor
from searches.predict.proposals import propose_all
from searches.predict.scan_predictor import ScanPredictor
from searches.report.live import LiveView
from searches.report.publish import log_results, publish
from searches.report.study_report import summary
from searches.space.bridge_spec import bridge_specs
from searches.space.search_space import SearchSpace
from searches.study.bench import ModelBench
from searches.study.cascade_costs import CostTimer, draft_cost, verify_cost
from searches.study.finals import Finals, measure_finals
from searches.study.leaderboard import LeaderboardEntry, contenders, incumbent
from searches.study.objective import Objective
from searches.study.opening import composed, connect, device_type, is_exported, is_shared, joined, place, share_finals
from searches.study.plan import Plan, default_name, describe
from searches.study.pruning import BoundEstimator
from searches.study.requeue import fail_orphans, requeue_unfinished
from searches.study.starting_points import starting_points
from searches.study.study import STUDY_ID, counting_preparation, finished, open_study, run_trials, with_stored_kinds
from searches.study.trained_finalists import TrainedBridges
from searches.tracking.tracker import Tracker
from searches.workers.alone import Workers
from searches.workers.slots import wait_for_slots


def search(config: DictConfig) -> Finals:
    """Run a composed study to its end and return the verdict; ``conf/layerskip.yaml`` is the configuration.

    1. Open the study, the MLflow run and the study's folder.
    2. Predict the speedups of many skip masks from scans, without decoding.
    3. Run trials, each of which decodes some tune prompts with one configuration.
    4. Train the bridges of the best configurations, if asked for, and measure all finalists on held-out prompts.
    5. Write the export and the report.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _opened_sweep(config) as sweep, sweep.view.closing():
        predictions = sweep.predict()
        sweep.run_trials(predictions)
        return sweep.finish(predictions)


@contextlib.contextmanager
def _opened_sweep(config: DictConfig) -> Iterator[Sweep]:
    """Open or resume everything that a study needs, and close it at the end."""
    pruner = instantiate_part(config, "pruner")
    instantiate_part(config, "sampler", seed=0)  # refuse a bad one before anything is written
    plan = Plan.of(config)
    settings = describe(config, plan.target, plan.prompts, plan.space.bridged, plan.backend)
    device, name = device_type(plan.target), plan.settings.name or default_name(config, settings)
    shared = is_shared(plan.settings, config.get("worker"), plan.outputs / name)
    name, folder = place(plan.outputs, name, plan.settings, device, shared)
    database, tracker = connect(config, plan.settings.storage)
    with joined(name, folder, plan.settings, database, device, shared) as (storage, crew):
        with crew.claim("opening"):
            study = open_study(name, storage, pruner, settings)
            described = environment(plan.target) | {"prompts_digest": plan.prompts.digest, "backend": plan.backend.name}
            tracker.open_study(name, str(study.user_attrs[STUDY_ID]), settings, described)
            tracker.log_text(composed(config), "config.yaml")
        # A resumed sampler must not repeat its earlier draws, nor those of other workers.
        study.sampler = instantiate_part(config, "sampler", seed=config.seed + len(study.trials) + crew.seed)
        plan = dataclasses.replace(plan, space=with_stored_kinds(plan.space, study))
        with tracker.closing(crew.leave), closing(plan.backend):
            yield Sweep(plan, study, tracker, folder, crew)


@dataclass(frozen=True)
class Predictions:
    """Everything that is known before the first trial.

    Args:
        predictor: predicts masks without bridges; None if layer skipping is not searched or not scanned.
        bridged: one predictor for each bridge spec of the space.
        space: the search space, with the costs that cascades choose by.
        starts: configurations to try first.
    """

    predictor: ScanPredictor | None
    bridged: Sequence[ScanPredictor]
    space: SearchSpace
    starts: Sequence[SpeculativeConfig]


class Sweep:
    """The steps of one study.

    Args:
        plan: the parts of its configuration.
        study: the opened study.
        tracker: takes its runs.
        folder: holds scans, finals, the report and the export.
        crew: the workers of the study.
    """

    def __init__(self, plan: Plan, study: optuna.Study, tracker: Tracker, folder: Path, crew: Workers) -> None:
        self.plan, self.study, self.tracker, self.folder, self.crew = plan, study, tracker, folder, crew
        self.tune, held_out = plan.prompts.split()
        self.held_out = held_out.take(plan.measuring.held_out_prompts)
        self.first_prompt = plan.seed * (plan.measuring.prompts or 0)  # another seed searches on other tune prompts
        self.bench = ModelBench(plan.backend, plan.sampling, plan.measuring.max_new_tokens, plan.load)
        self.view = LiveView(study, folder, plan.target.layers, plan.settings.n_trials, crew)
        self.ledgers = TimeLedger(study, FITS), TimeLedger(study, SHARED)
        if plan.bridge_store is not None:
            plan.bridge_store.report_cost, plan.bridge_store.report_texts_cost = (ledger.use for ledger in self.ledgers)

    def predict(self) -> Predictions:
        """Scan masks, measure costs, and choose the configurations to try first."""
        plan = self.plan
        self.view.begin("predictions")
        with counting_preparation(self.study, self.ledgers, self.crew):
            predictor = self._prepare_predictor()
            bridged = self._bridged_predictors(predictor)
            proposed = self._propose(predictor, bridged)
            space = self._space_with_costs(predictor) if "cascade" in plan.space.available_kinds else plan.space
            starts = starting_points(space, proposed)
        if self.crew.leads():
            self._log_fits()
        self.view.singles = None if predictor is None else predictor.single_agreements()
        return Predictions(predictor, bridged, space, starts)

    def run_trials(self, predictions: Predictions) -> None:
        """Run trials until the study has enough; Ctrl-C prints a summary of the finished ones."""
        study, plan, settings = self.study, self.plan, self.plan.settings
        requeue_unfinished(study, self.crew)
        if self.crew.alone:
            self.tracker.reconcile(finished(study))
        print(f"study {study.study_name}: {len(finished(study))} of {settings.n_trials} trials are finished", flush=True)
        if len(self.held_out) < LEAST_RESAMPLED:
            print(
                f"prompts: {len(self.held_out)} held-out prompts cannot show that anything is faster than plain decoding: "
                f"{LEAST_RESAMPLED} are the least",
                flush=True,
            )
        self.view.begin("trials")
        predictor, bridged = predictions.predictor, predictions.bridged
        bounds = None if predictor is None else BoundEstimator(predictor, bridged)
        with tqdm(total=settings.n_trials, initial=len(finished(study)), unit="trial", disable=None) as bar:
            parts = self.bench, predictions.space, self.tune, plan.measuring, plan.seed, self.view.after(bar.refresh), bounds
            objective = Objective(*parts, self.first_prompt)

            def on_trial(trial: optuna.trial.FrozenTrial) -> None:
                self.tracker.record(trial)
                self.view.refresh()
                bar.update()
                bar.set_postfix_str(f"best {incumbent(study):.3f} x")

            try:
                run_trials(study, objective, settings, on_trial, predictions.starts, self.ledgers, self.crew)
            except BaseException as error:
                if is_interrupt(error):
                    bar.close()
                    print(summary(study, None))
                raise

    def finish(self, predictions: Predictions) -> Finals:
        """Measure the finalists and publish the results, which one of the workers does; return the results."""
        study, crew = self.study, self.crew
        wait_for_slots(crew)
        fail_orphans(study, crew.orphans(study.get_trials(deepcopy=False), is_idle=True))
        trials = finished(study)
        parts = predictions.predictor, self.plan, study, self.held_out, self.tracker, self.folder

        def work(check: Callable[[], None]) -> Finals:
            self.tracker.reconcile(trials)
            finals = self._measure_finalists(predictions, check)
            publish(finals, *parts)
            return finals

        finals = share_finals(crew, trials, work)
        if not is_exported(self.folder / "best.json", study.study_name, len(trials)):  # another file system has it
            publish(finals, *parts, log=False)
        with crew.claim("mirror"):  # a store that was away for the worker with the finals may be back
            self.tracker.reconcile(trials)
            log_results(finals, study, self.tracker, self.folder, again=False)
        return finals

    def _measure_finalists(self, predictions: Predictions, check: Callable[[], None]) -> Finals:
        """Train the bridges of the best configurations, and measure all finalists on held-out prompts."""
        measuring = self.plan.measuring
        self.view.begin("finals", is_alone=True)
        with counting_preparation(self.study, self.ledgers, self.crew):
            trained = self._train_bridges(predictions)
        self._log_fits()
        most = len(self.held_out) * measuring.held_out_repeats
        with tqdm(total=most, unit="prompt", desc="held-out", disable=None) as bar:

            def on_prompt() -> None:
                check()
                bar.update()
                self.view.refresh()

            return measure_finals(
                self.study, self.bench, self.held_out, measuring, self.plan.seed, self.folder, on_prompt, trained
            )

    def _prepare_predictor(self) -> ScanPredictor | None:
        """Return the predictor of masks without bridges, if layer skipping is searched and scanned."""
        plan = self.plan
        if not plan.scanning.enabled or "layer_skip" not in plan.space.available_kinds:
            return None
        prompts = self.tune.take(plan.scanning.prompts, self.first_prompt)
        predictor = prepare_predictor(
            plan.target,
            prompts,
            plan.sampling,
            plan.measuring.max_new_tokens,
            plan.space,
            plan.scanning,
            plan.outputs,
            self.folder,
            plan.seed,
            self.ledgers[1].use,
            self.crew,
        )
        if predictor is None:
            print("scan: no predictions; every trial is decoded")
        return predictor

    def _bridged_predictors(self, predictor: ScanPredictor | None) -> list[ScanPredictor]:
        """Return a predictor for each bridge spec of the space. The first spec has no bridges: ``predictor`` itself."""
        space, store = self.plan.space, self.plan.bridge_store
        if predictor is None or store is None:
            return []
        specs = bridge_specs(space.bridges, space.ranks, space.draft_heads, space.widths)
        return [predictor.bridged(spec, store) for spec in specs[1:]]

    def _propose(self, predictor: ScanPredictor | None, bridged: Sequence[ScanPredictor]) -> list[SpeculativeConfig]:
        """Propose configurations from scans, fastest first."""
        if predictor is None:
            return []
        plan, settings = self.plan, self.plan.scanning.proposals
        masks = settings.budget(plan.space) * (1 + len(bridged))
        with tqdm(total=masks, unit="mask", desc="scan", disable=None) as bar:
            similar = predictor.similar_masks(plan.space.skippable)
            empty = [other for other in bridged if other.bridge_spec.bridge == "none"]
            filled = [other for other in bridged if other not in empty]
            return propose_all(predictor, plan.space, settings, self.view.after(bar.update), similar, filled, empty)

    def _space_with_costs(self, predictor: ScanPredictor | None) -> SearchSpace:
        """Return the space with the costs of verification and drafting.

        They are those at the contexts of the cost profile. If there is none, verification is timed alone at the mean
        context; so is drafting if there is one context.
        """
        plan, study = self.plan, self.study
        lengths = [len(plan.target.encode(item.messages())) for item in self.tune]
        context = round(statistics.fmean(lengths) + plan.measuring.max_new_tokens / 2)
        timer = CostTimer(plan.target, plan.sampling, [context], plan.seed)
        claim = partial(self.crew.claim, "costs")
        with claim():
            costs = verify_cost(study, timer.verify_costs if predictor is None else lambda: predictor.profile.verify_cost)
            timer = dataclasses.replace(timer, contexts=contexts_of(costs) or timer.contexts)
            drafting = draft_cost(study, timer.draft_costs, claim) if costs else None
        return dataclasses.replace(plan.space, verify_cost=costs, draft_cost=drafting)

    def _train_bridges(self, predictions: Predictions) -> list[LeaderboardEntry]:
        """Return the bridged contenders once more, with trained bridges, if the study trains any."""
        store = self.plan.bridge_store
        if store is None or not store.trains:
            return []
        trained = TrainedBridges(store, self.tracker, predictions.space.draft_cost)
        return trained.finalists(contenders(self.study, self.plan.measuring.finalists), predictions.bridged)

    def _log_fits(self) -> None:
        """Log the bridges that were fitted for the study so far."""
        store = self.plan.bridge_store
        if store is not None:
            self.tracker.log_fits([store.fit_record(name) for name in recorded_seconds(self.study, FITS)])
