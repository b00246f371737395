"""Does an export hold here and today? ``python -m searches.verify best.json`` measures it again and says so.

The export's configuration and plain decoding take turns on held-out prompts, repeat by repeat, until the verdict is clear or
the budget is spent; what was measured before an interruption is kept until there is a verdict. See :mod:`searches.verification.claim` for
what decides. The exit code is the verdict: 0 confirmed, 3 weaker, 4 refuted. A lossy export is refused unless
``allow_lossy=true``, and is weaker at best.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip import Export, Measurement, PromptSet, SpeculativeConfig, Target, load_target
from layerskip.attachments import digests
from layerskip.files import digest, write_json
from layerskip.measure.measurement import LEAST_RESAMPLED
from layerskip.models.environment import environment, machine
from searches.app.application import NOT_SHOWN
from searches.app.checks import InputError, check_flag, check_seed, check_whole
from searches.app.interrupt import INTERRUPTED
from searches.app.record_header import program_sources
from searches.app.resume_log import ResultLog
from searches.study.bench import BASELINE, Bench, ModelBench, Row, go_on
from searches.study.plan import check_prompts
from searches.training.datastores import refuse_answers_of
from searches.verification.claim import Claim, Speedup, Verdict, judge, judge_plain
from searches.verification.report import differences, report, table

EXIT_CODES = {"confirmed": 0, "weaker": 3, "refuted": NOT_SHOWN}
_CANDIDATE = "export"
_MAX_NEW_TOKENS = 48
_STALE = 6 * 3600  # seconds since the last prompt of a run that was interrupted
_REPEATED = 1000  # so far apart are the seeds of two repeats, each of which counts them up prompt by prompt


@dataclass(frozen=True)
class VerifySettings:
    """How an export is measured again.

    Args:
        max_new_tokens: per prompt and turn; None takes the evidence's, or 48 where it does not say.
        held_out_prompts: how many; None takes all.
        most_repeats: how often each of them is decoded where the verdict does not become clear.
        tolerance: the share of a claimed speedup that may be lost from day to day, in [0, 1).
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
        share = self.tolerance
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise InputError(f"measure.tolerance: {share!r} is not a number of at least 0 and below 1")

    def asked_like(self, evidence: Mapping[str, Any]) -> int:
        """The new tokens per prompt, so that outputs are as long as those the evidence is of."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        said = evidence.get("max_new_tokens", _MAX_NEW_TOKENS)
        check_whole("evidence.max_new_tokens", said)
        return int(said)


def verify(config: DictConfig) -> None:
    """Verify an export; see ``conf/verify.yaml``.

    Raises:
        SystemExit: the export was not confirmed, or measuring was interrupted; the code says which.
    """
    check_seed(config.seed)
    check_flag("allow_lossy", config.allow_lossy)
    settings = VerifySettings(**config.measure)
    if OmegaConf.is_missing(config, "export"):
        raise InputError("export: is missing; name the file, as in python -m searches.verify best.json")
    path = str(config.export)
    export = Export.load(path)
    if not (export.config.lossless or config.allow_lossy):
        rule = export.config.accept.kind
        raise InputError(f"config.accept: {rule} may change the output (in {path}); allow_lossy=true measures it, too")
    max_new_tokens = settings.asked_like(export.evidence)
    all_prompts: PromptSet = instantiate(config.prompts)
    held_out = all_prompts.split()[1]
    prompts = held_out.take(settings.held_out_prompts)
    claim = Claim.of(export, held_out, prompts, max_new_tokens)
    if len(prompts) < LEAST_RESAMPLED:
        raise InputError(f"prompts: {len(prompts)} held-out prompts say next to nothing; {LEAST_RESAMPLED} are the least")
    target = _load(config.target, export)
    export.check(target)
    claim = dataclasses.replace(claim, repeatable=claim.repeatable and _is_alike(export, target))
    refuse_answers_of("config", export.config, target, prompts)
    check_prompts(prompts, target, max_new_tokens)
    rows: list[Row] = []
    asked = [export.config.to_dict(), export.sampling.to_dict(), max_new_tokens, prompts.digest, config.seed]
    asked += [target.digest, machine(target), digests(export.config), program_sources()]
    unfinished = Path(config.outputs) / f"verify-{digest(asked)[:12]}.jsonl"
    if unfinished.exists() and time.time() - unfinished.stat().st_mtime > _STALE:
        unfinished.unlink()  # what was measured so long ago says nothing of now
    kept = ResultLog(unfinished)
    if export.config.kind == "none":
        verdict = judge_plain(claim.speedup)
    else:
        bench = ModelBench(target, export.sampling, max_new_tokens)
        try:
            begun = f"; {len(kept)} of them were before an interruption ({unfinished})" if len(kept) else ""
            what = f"{export.config.label()} on {len(prompts)} prompts, at most {settings.most_repeats} x"
            print(f"measuring {what}{begun}", flush=True)
            with tqdm(total=len(prompts) * settings.most_repeats, unit="prompt", disable=None) as bar:
                verdict = measure_claim(bench, export.config, claim, prompts, settings, config.seed, kept, rows, bar.update)
        except KeyboardInterrupt:
            if rows:
                print("\n".join(table(export, Measurement.of(rows, BASELINE, _CANDIDATE), settings.most_repeats)))
            print(f"interrupted after {len(rows)} prompts: no verdict; the same command goes on", file=sys.stderr)
            sys.exit(INTERRUPTED)
    measurement = Measurement.of(rows, BASELINE, _CANDIDATE) if rows else None
    conditions = {
        "target": Export.describe(target),
        "environment": environment(target),
        "prompts": {"name": prompts.name, "count": len(prompts), "digest": prompts.digest},
        "max_new_tokens": max_new_tokens,
    }
    record = {
        "schema": "layerskip.verification/1",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "verdict": verdict.name,
        "reason": verdict.reason,
        "export": path,
        "config": export.config.to_dict(),
        "sampling": export.sampling.to_dict(),
        "claimed": dataclasses.asdict(claim.speedup) if claim.speedup is not None else None,
        "measured": measurement.to_dict() if measurement is not None else None,
        "tolerance": settings.tolerance,
        "repeats": len(rows) // len(prompts),
        "looks": settings.most_repeats,  # at the measurement, whose intervals hold for all of them together
        "seed": config.seed,
        **conditions,
        "differences": differences(export, conditions),
    }
    print(report(record, export, measurement))
    file = Path(config.record or Path(config.outputs) / "verify.json")
    try:
        write_json(file, record)
    except OSError as error:
        raise InputError(f"{'record' if config.record else 'outputs'}: cannot write {file}: {error.strerror}") from error
    print(f"wrote {file}")
    unfinished.unlink(missing_ok=True)  # whoever asks again wants to know of another day
    if verdict.name != "confirmed":
        sys.exit(EXIT_CODES[verdict.name])


def _is_alike(export: Export, target: Target) -> bool:
    """Whether the export's outputs must come again: from the model that it names, and where near-ties of rounding count, on
    a device of the same name."""
    found, here = export.environment, machine(target)
    exact = target.dtype == "float32" or found.get("device_name") == here["device_name"]
    return exact and dict(export.target) == Export.describe(target)


def _load(fields: DictConfig, export: Export) -> Target:
    """The model that was asked for, else the one that the export names."""
    if fields.dtype is None:
        fields.dtype = export.target["dtype"]
    if "_target_" in fields:
        target: Target = instantiate(fields)
        return target
    return load_target(
        export.target["name"],
        revision=export.target.get("revision"),
        dtype=fields.dtype,
        device=fields.device,
        trust_remote_code=fields.trust_remote_code,
    )


def measure_claim(
    bench: Bench,
    config: SpeculativeConfig,
    claim: Claim,
    prompts: PromptSet,
    settings: VerifySettings,
    seed: int,
    kept: ResultLog,
    rows: list[Row],
    on_prompt: Callable[[], object] = lambda: None,
) -> Verdict:
    """Measure a configuration against plain decoding until what was claimed of it can be judged, or the budget is spent.

    Args:
        bench: what it is measured on.
        config: it drafts.
        claim: what its export says.
        prompts: decoded all of them before anything is judged.
        settings: how often.
        seed: of orders and draws.
        kept: samples of a run that was interrupted, which are not measured again; takes the others.
        rows: takes the samples, prompt by prompt, so that an interruption leaves them there.
        on_prompt: called after every prompt, for a progress bar.
    """
    for repeat in range(settings.most_repeats):
        for row in go_on(bench, {_CANDIDATE: config}, prompts, seed + _REPEATED * repeat, kept, str(repeat)):
            rows.append(row)
            on_prompt()
        measurement = Measurement.of(rows, BASELINE, _CANDIDATE)
        found = Speedup.measured(measurement, settings.most_repeats)
        per_round = measurement.stats.tokens_per_round
        verdict = judge(claim, found, measurement.lossless.verdict, settings.tolerance, per_round)
        if verdict.clear:
            break
    return verdict


def command_line(arguments: Sequence[str]) -> list[str]:
    """The arguments as Hydra takes them: a path in front becomes the override that it stands for."""
    if not arguments or "=" in arguments[0] or arguments[0].startswith(("-", "~")):
        return list(arguments)
    # Hydra reads a quoted value as it is, but for quotes and the backslashes before them.
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), arguments[0])
    return [f"export='{quoted}'", *arguments[1:]]
