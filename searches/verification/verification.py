"""The program ``python -m searches.verify best.json``: measure an export again, on this machine and today.

The export's configuration and plain decoding take turns on held-out prompts, repeat by repeat, until the verdict is clear or
the repeats are used up. An interrupted run resumes. The exit code states the verdict of :mod:`searches.verification.claim`:
0 confirmed, 3 weaker, 4 refuted. A lossy export is refused unless ``allow_lossy=true``, and is weaker at best.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip import Export, Measurement, PromptSet, SpeculativeConfig, Target
from layerskip.attachments import attachment_digests
from layerskip.files import digest, write_json
from layerskip.measure.measurement import LEAST_RESAMPLED
from layerskip.models.environment import machine
from searches.app.application import NOT_CONFIRMED
from searches.app.checks import InputError, check_flag, check_number, check_seed, check_whole
from searches.app.exported import load_exported_target
from searches.app.interrupt import interrupt_code
from searches.app.record_header import program_sources, record_header
from searches.app.resume_log import ResultLog
from searches.backends.selection import closing, described, exported_backend
from searches.study.bench import BASELINE, Bench, ModelBench, Row, resumed_rows
from searches.study.plan import check_prompts
from searches.training.datastores import refuse_answers_of
from searches.verification.claim import Claim, Speedup, Verdict, judge, judge_plain
from searches.verification.report import differences, report, table

EXIT_CODES = {"confirmed": 0, "weaker": 3, "refuted": NOT_CONFIRMED}
_CANDIDATE = "export"
_MAX_NEW_TOKENS = 48
_STALE = 6 * 3600  # seconds after which the rows of an interrupted run are discarded
_SEED_STEP = 1000  # between the seeds of two repeats, each of which counts up prompt by prompt


@dataclass(frozen=True)
class VerifySettings:
    """Settings of measuring an export.

    Args:
        max_new_tokens: new tokens per prompt and turn; None takes the evidence's, or 48 if it does not state them.
        held_out_prompts: number of held-out prompts; None takes all.
        most_repeats: how often each of them is decoded if the verdict does not become clear.
        tolerance: share of the claimed speedup that machines and days may differ by, in [0, 1).
    """

    max_new_tokens: int | None = None
    held_out_prompts: int | None = None
    most_repeats: int = 3
    tolerance: float = 0.2

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "held_out_prompts", "most_repeats"):
            value = getattr(self, name)
            if value is not None or name == "most_repeats":
                check_whole(f"measure.{name}", value)
        check_number("measure.tolerance", self.tolerance, or_zero=True)
        if self.tolerance >= 1:
            raise InputError(f"measure.tolerance: {self.tolerance!r} is not below 1")

    def new_tokens(self, evidence: Mapping[str, Any]) -> int:
        """Return the new tokens per prompt and turn, by default those of the evidence."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        count = evidence.get("max_new_tokens", _MAX_NEW_TOKENS)
        check_whole("evidence.max_new_tokens", count)
        return int(count)


def verify(config: DictConfig) -> None:
    """Verify an export; ``conf/verify.yaml`` is the configuration.

    Exits with one of ``EXIT_CODES`` unless the export is confirmed.
    """
    check_seed(config.seed)
    check_flag("allow_lossy", config.allow_lossy)
    settings = VerifySettings(**config.measure)
    export = _load_export(config)
    max_new_tokens = settings.new_tokens(export.evidence)
    all_prompts: PromptSet = instantiate(config.prompts)
    held_out = all_prompts.split()[1]
    prompts = held_out.take(settings.held_out_prompts)
    claim = Claim.of(export, held_out, prompts, max_new_tokens)
    if len(prompts) < LEAST_RESAMPLED:
        raise InputError(f"prompts: {len(prompts)} held-out prompts are too few; {LEAST_RESAMPLED} are the least")
    target = load_exported_target(config.target, export)
    export.check(target)
    claim = dataclasses.replace(claim, repeatable=claim.repeatable and _is_alike(export, target))
    refuse_answers_of("config", export.config, target, prompts)
    check_prompts(prompts, target, max_new_tokens)
    backend, load = exported_backend(config, export, target)
    engine = described(backend, load)
    asked = [export.config.to_dict(), export.sampling.to_dict(), max_new_tokens, prompts.digest, config.seed, engine]
    asked += [target.digest, machine(target), attachment_digests(export.config), program_sources()]
    unfinished = Path(config.outputs) / f"verify-{digest(asked)[:12]}.jsonl"
    rows: list[Row] = []
    if export.config.kind == "none":
        verdict = judge_plain(claim.speedup)
    else:
        bench = ModelBench(backend, export.sampling, max_new_tokens, load)
        with closing(backend):
            verdict = _measure(bench, export, claim, prompts, settings, config.seed, unfinished, rows)
    measurement = Measurement.of(rows, BASELINE, _CANDIDATE) if rows else None
    header = record_header("layerskip.verification/1", target)
    record = header | {
        "environment": header["environment"] | engine,
        "verdict": verdict.name,
        "reason": verdict.reason,
        "export": str(config.export),
        "config": export.config.to_dict(),
        "sampling": export.sampling.to_dict(),
        "claimed": dataclasses.asdict(claim.speedup) if claim.speedup is not None else None,
        "measured": measurement.to_dict() if measurement is not None else None,
        "tolerance": settings.tolerance,
        "repeats": len(rows) // len(prompts),
        "looks": settings.most_repeats,  # the interval holds for all of them together
        "seed": config.seed,
        "prompts": {"name": prompts.name, "count": len(prompts), "digest": prompts.digest},
        "max_new_tokens": max_new_tokens,
    }
    record["differences"] = differences(export, record)
    print(report(record, export, measurement))
    file = Path(config.record or Path(config.outputs) / "verify.json")
    try:
        write_json(file, record)
    except OSError as error:
        raise InputError(f"{'record' if config.record else 'outputs'}: cannot write {file}: {error.strerror}") from error
    print(f"wrote {file}")
    unfinished.unlink(missing_ok=True)  # the next run measures again
    if verdict.name != "confirmed":
        sys.exit(EXIT_CODES[verdict.name])


def _load_export(config: DictConfig) -> Export:
    """Return the export, unless it is lossy and that is not allowed."""
    if OmegaConf.is_missing(config, "export"):
        raise InputError("export: is missing; name the file, as in python -m searches.verify best.json")
    path = str(config.export)
    export = Export.load(path)
    if not (export.config.lossless or config.allow_lossy):
        rule = export.config.accept.kind
        raise InputError(f"config.accept: {rule} may change the output (in {path}); allow_lossy=true measures it, too")
    return export


def _is_alike(export: Export, target: Target) -> bool:
    """Return whether the export's outputs must repeat: same model, and in half precision a device of the same name."""
    device_name = export.environment.get("device_name")
    exact = target.dtype == "float32" or device_name == machine(target)["device_name"]
    return exact and dict(export.target) == Export.describe(target)


def _measure(
    bench: ModelBench,
    export: Export,
    claim: Claim,
    prompts: PromptSet,
    settings: VerifySettings,
    seed: int,
    unfinished: Path,
    rows: list[Row],
) -> Verdict:
    """Measure an export with a progress bar; Ctrl-C prints the figures so far.

    ``unfinished`` keeps rows as they are measured. The other arguments are those of :func:`measure_claim`.
    """
    if unfinished.exists() and time.time() - unfinished.stat().st_mtime > _STALE:
        unfinished.unlink()
    log = ResultLog(unfinished)
    try:
        resumed = f"; {len(log)} of them were before an interruption ({unfinished})" if len(log) else ""
        asked = f"{export.config.label()} on {len(prompts)} prompts, at most {settings.most_repeats} x"
        print(f"measuring {asked}{resumed}", flush=True)
        with tqdm(total=len(prompts) * settings.most_repeats, unit="prompt", disable=None) as bar:
            return measure_claim(bench, export.config, claim, prompts, settings, seed, log, rows, bar.update)
    except KeyboardInterrupt as error:
        if rows:
            print("\n".join(table(export, Measurement.of(rows, BASELINE, _CANDIDATE), settings.most_repeats)))
        print(f"interrupted after {len(rows)} prompts: no verdict; the same command resumes", file=sys.stderr)
        sys.exit(interrupt_code(error))


def measure_claim(
    bench: Bench,
    config: SpeculativeConfig,
    claim: Claim,
    prompts: PromptSet,
    settings: VerifySettings,
    seed: int,
    log: ResultLog,
    rows: list[Row],
    on_prompt: Callable[[], object] = lambda: None,
) -> Verdict:
    """Measure a configuration against plain decoding until its claim can be judged or the repeats are used up.

    Args:
        bench: measures it.
        config: the configuration of the export.
        claim: of the export.
        prompts: all of them are decoded before anything is judged.
        settings: the number of repeats and the tolerance.
        seed: of the measurement.
        log: rows of an interrupted run, which are not measured again; takes the new ones.
        rows: takes the rows one by one, so that an interruption leaves them there.
        on_prompt: called after each prompt.
    """
    for repeat in range(settings.most_repeats):
        for row in resumed_rows(bench, {_CANDIDATE: config}, prompts, seed + _SEED_STEP * repeat, log, str(repeat)):
            rows.append(row)
            on_prompt()
        measurement = Measurement.of(rows, BASELINE, _CANDIDATE)
        measured = Speedup.measured(measurement, settings.most_repeats)
        per_round = measurement.stats.tokens_per_round
        lossless, decoded = measurement.lossless.verdict, measurement.decoded.prompts
        verdict = judge(claim, measured, lossless, settings.tolerance, per_round, decoded)
        if verdict.clear:
            break
    return verdict
