"""The study: search a target's fastest lossless decoding, confirm it on held-out prompts, export it.

``python -m searches.layerskip`` with Hydra overrides; the same command again goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path

import optuna
from omegaconf import DictConfig, OmegaConf
from optuna.storages import BaseStorage
from tqdm import tqdm

from layerskip import Export, PromptSet, SkipMask, SpeculativeConfig
from layerskip.attachments import attached
from layerskip.measure.measurement import LEAST_RESAMPLED
from layerskip.models.environment import environment
from layerskip.texts.continuations import OnUse
from searches.app.application import made
from searches.app.interrupt import is_interrupt
from searches.app.time_ledger import FITS, SHARED, TimeLedger, seconds_of
from searches.app.urls import without_password
from searches.predict.preparation import prepare_oracle
from searches.predict.proposals import propose_all
from searches.predict.scan_oracle import ScanOracle
from searches.predict.stability import SeedStability, across_seeds
from searches.report import study_plots as report_picture
from searches.report import study_report as report
from searches.space.bridge_spec import bridge_specs
from searches.space.search_space import SearchSpace
from searches.study.bench import ModelBench
from searches.study.cascade_costs import Timer, draft_cost, verify_cost
from searches.study.finals import Finals, measure_finals
from searches.study.leaderboard import LeaderboardEntry, contenders, incumbent, ranking
from searches.study.objective import Objective
from searches.study.plan import Plan, default_name, describe
from searches.study.pruning import Prior
from searches.study.starting_points import starting_points
from searches.study.study import (
    SETTINGS,
    as_before,
    finished,
    foreseeing,
    locked,
    open_database,
    open_journal,
    open_study,
    prepare,
    run_trials,
    study_id,
)
from searches.study.trained_finalists import TrainedBridges
from searches.tracking.tracker import Tracker


def search(config: DictConfig) -> Finals:
    """Run a composed study to its end; see ``conf/layerskip.yaml``."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner, _ = made(config, "pruner"), made(config, "sampler", seed=0)  # refused now, before anything is written
    plan = Plan.of(config)
    flat = describe(config, plan.target, plan.prompts, plan.space.bridged)
    name = plan.settings.name or default_name(config, flat)
    folder = plan.outputs / name
    database, tracker = _connect(config, plan.settings.storage)
    with locked(folder):
        storage = database or open_journal(Path(plan.settings.storage or folder / "journal.log"), not plan.settings.storage)
        study = open_study(name, storage, pruner, flat)
        # A resumed sampler must not draw once more what it drew before.
        study.sampler = made(config, "sampler", seed=config.seed + len(study.trials))
        plan = dataclasses.replace(plan, space=as_before(plan.space, study))
        described = environment(plan.target) | {"prompts_digest": plan.prompts.digest}
        tracker.open_study(name, study_id(study), flat, described)
        tracker.log_text(_composed(config), "config.yaml")
        with tracker.closing():
            return _search(plan, study, tracker, folder)


def _connect(config: DictConfig, storage: str | None) -> tuple[BaseStorage | None, Tracker]:
    """Reach what may be out of reach before anything is written here."""
    track = functools.partial(Tracker, config.tracking.uri, Path(config.outputs), config.tracking.experiment)
    remote = track() if config.tracking.uri is not None else None
    database = open_database(storage) if storage is not None and "://" in storage else None
    return database, remote or track()


def _composed(config: DictConfig) -> str:
    """The composed configuration as YAML, its databases without passwords."""
    shown = config.copy()
    for part, name in (("study", "storage"), ("tracking", "uri")):
        if shown[part][name] is not None:
            shown[part][name] = without_password(str(shown[part][name]))
    return OmegaConf.to_yaml(shown, resolve=True)


def _search(plan: Plan, study: optuna.Study, tracker: Tracker, folder: Path) -> Finals:
    tune, held_out = plan.prompts.split()
    measuring, settings = plan.measuring, plan.settings
    fits, shared = ledgers = TimeLedger(study, FITS), TimeLedger(study, SHARED)
    if plan.bridge_store is not None:
        plan.bridge_store.on_use, plan.bridge_store.on_texts = fits.use, shared.use
    with foreseeing(study, ledgers):
        oracle = _foresee(plan, tune, folder, shared.use)
        bridged = _bridged(oracle, plan)
        proposed = _propose(oracle, bridged, plan)
        if "cascade" in plan.space.arms:
            plan = dataclasses.replace(plan, space=_priced(plan, study, tune, oracle))
        starts = starting_points(plan.space, proposed)
    _log_fits(plan, study, tracker)
    prepare(study)
    for trial in finished(study):
        tracker.record(trial)
    print(f"study {study.study_name}: {len(finished(study))} of {settings.n_trials} trials are there", flush=True)
    final_prompts = held_out.take(measuring.held_out_prompts)
    if len(final_prompts) < LEAST_RESAMPLED:
        few = f"{len(final_prompts)} held-out prompts cannot show that anything is faster than plain decoding"
        print(f"prompts: {few}: {LEAST_RESAMPLED} are the least", flush=True)
    bench = ModelBench(plan.target, plan.sampling, measuring.max_new_tokens)
    prior = None if oracle is None else Prior(oracle, bridged)
    with tqdm(total=settings.n_trials, initial=len(finished(study)), unit="trial", disable=None) as bar:
        objective = Objective(bench, plan.space, tune, measuring, plan.seed, bar.refresh, prior, _begin(plan))

        def on_trial(trial: optuna.trial.FrozenTrial) -> None:
            tracker.record(trial)
            bar.update()
            bar.set_postfix_str(f"best {incumbent(study):.3f} x")

        try:
            run_trials(study, objective, settings, on_trial, starts, ledgers)
        except BaseException as error:
            if is_interrupt(error):
                bar.close()
                print(report.summary(study, None))
            raise
    with foreseeing(study, ledgers):
        trained = _trained(plan, study, tracker, bridged)
    _log_fits(plan, study, tracker)
    rounds = len(final_prompts) * measuring.held_out_repeats
    with tqdm(total=rounds, unit="prompt", desc="held-out", disable=None) as bar:
        finals = measure_finals(study, bench, final_prompts, measuring, plan.seed, folder, bar.update, trained)
    _publish(plan, study, tracker, finals, oracle, folder, final_prompts)
    return finals


def _log_fits(plan: Plan, study: optuna.Study, tracker: Tracker) -> None:
    """Let MLflow see what was fitted for the study so far."""
    if plan.bridge_store is not None:
        tracker.log_fits([plan.bridge_store.described(name) for name in seconds_of(study, FITS)])


def _trained(plan: Plan, study: optuna.Study, tracker: Tracker, bridged: Sequence[ScanOracle]) -> list[LeaderboardEntry]:
    """The finalists that are bridged once more, with trained bridges, where a study trains any."""
    if plan.bridge_store is None or not plan.bridge_store.trains:
        return []
    trained = TrainedBridges(plan.bridge_store, tracker, plan.space.draft_cost)
    return trained.finalists(contenders(study, plan.measuring.finalists), bridged)


def _foresee(plan: Plan, tune: PromptSet, folder: Path, on_use: OnUse) -> ScanOracle | None:
    """An oracle, where layer skipping is searched and scanning is asked for."""
    scanning, measuring = plan.scanning, plan.measuring
    if not scanning.enabled or "layer_skip" not in plan.space.arms:
        return None
    prompts = tune.take(scanning.prompts, _begin(plan))
    oracle = prepare_oracle(
        plan.target,
        prompts,
        plan.sampling,
        measuring.max_new_tokens,
        plan.space,
        scanning,
        plan.outputs,
        folder,
        plan.seed,
        on_use,
    )
    if oracle is None:
        print("scan: every trial is run")
    return oracle


def _begin(plan: Plan) -> int:
    """Place of the first tune prompt of scans and trials: another seed searches on others, whether it agrees or not."""
    return plan.seed * (plan.measuring.prompts or 0)


def _bridged(oracle: ScanOracle | None, plan: Plan) -> list[ScanOracle]:
    """Oracles of all that masks can be made up with, where the space has something to make them up with."""
    space, bridge_store = plan.space, plan.bridge_store
    if oracle is None or bridge_store is None:
        return []
    made = bridge_specs(space.bridges, space.ranks, space.draft_heads, space.widths)
    return [oracle.bridged(bridge_spec, bridge_store) for bridge_spec in made[1:]]


def _priced(plan: Plan, study: optuna.Study, tune: PromptSet, oracle: ScanOracle | None) -> SearchSpace:
    """The space, with what drafts and their verification cost here; the latter timed by itself where there is no profile."""
    lengths = [len(plan.target.encode(item.messages())) for item in tune]
    context = round(statistics.fmean(lengths) + plan.measuring.max_new_tokens / 2)
    timer = Timer(plan.target, plan.sampling, context, plan.seed)
    costs = verify_cost(study, timer.verifying if oracle is None else lambda: oracle.profile.verify_cost)
    return dataclasses.replace(
        plan.space, verify_cost=costs, draft_cost=draft_cost(study, timer.drafting) if costs else None
    )


def _propose(oracle: ScanOracle | None, bridged: list[ScanOracle], plan: Plan) -> list[SpeculativeConfig]:
    if oracle is None:
        return []
    asked = plan.scanning.proposals.asked(plan.space)
    with tqdm(total=asked * (1 + len(bridged)), unit="mask", desc="scan", disable=None) as bar:
        also = oracle.similar_masks(plan.space.skippable)
        empty = [other for other in bridged if other.bridge_spec.bridge == "none"]
        bridged = [other for other in bridged if other not in empty]
        return propose_all(oracle, plan.space, plan.scanning.proposals, bar.update, also, bridged, empty)


def _publish(
    plan: Plan,
    study: optuna.Study,
    tracker: Tracker,
    finals: Finals,
    oracle: ScanOracle | None,
    folder: Path,
    prompts: PromptSet,
) -> None:
    """Write the report and the export, and log both."""
    winner, target = finals.winner, plan.target
    spent = report.search_seconds(study, finals)
    found = {"study": study.study_name, "trials": len(finished(study)), "seconds": spent, "mlflow_run_id": tracker.run_id}
    evidence = dict(winner.held_out) | {"prompts_digest": prompts.digest, "max_new_tokens": plan.measuring.max_new_tokens}
    where = environment(target)
    export = Export(Export.describe(target), winner.config, plan.sampling, evidence, where, search=found)
    export.save(folder / "best.json")
    stable = oracle.stability(2 * len(plan.space.skippable)) if oracle is not None else None
    scan_seconds = oracle.scan_seconds if oracle is not None else None
    text = report.summary(study, finals, stable, _compare_seeds(study, plan, folder, oracle), scan_seconds)
    (folder / "report.md").write_text(text, encoding="utf-8")
    singles = oracle.single_agreements() if oracle is not None else None
    report_picture.draw(study, finals, target.layers, folder / "report.png", singles)
    for name in ("report.md", "report.png", "best.json"):
        tracker.log_file(folder / name)
    for place in attached(folder / "best.json"):
        for path in sorted(place.iterdir()):
            tracker.log_file(path, place.name)
    tracker.log(
        tracker.run_id,
        {
            "held_out_speedup": winner.held_out["speedup"],
            "held_out_speedup_low": winner.held_out["speedup_low"],
            "held_out_speedup_high": winner.held_out["speedup_high"],
            "held_out_tokens_per_second": winner.held_out["tokens_per_second"],
            "search_seconds": spent,
            "trials": len(finished(study)),
        },
    )
    tracker.tag({"winner": winner.config.label(), "verdict": report.verdict(finals)})
    print(text)
    print(f"wrote {folder / 'best.json'} and {folder / 'report.png'}; compare runs with:")
    print(f"  mlflow ui --backend-store-uri {without_password(tracker.uri)}")


def _compare_seeds(study: optuna.Study, plan: Plan, folder: Path, oracle: ScanOracle | None) -> SeedStability | None:
    """How like the best mask is to those that the same study chose with other seeds; where none was decoded with, as none
    could win, the one that is foretold to be fastest."""
    tried = (SkipMask.parse(found.config.mask, plan.target.layers) for found in ranking(study) if found.config.mask)
    mask = next(tried, None) or (oracle.foremost() if oracle is not None else None)
    if mask is None:
        return None
    return across_seeds(folder, study.user_attrs[SETTINGS], mask, 2 * len(plan.space.skippable))
