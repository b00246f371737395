"""An export measured again, on this machine and today.

Usage: ``python -m searches.verify outputs/<study>/best.json [field=value]``

The export's configuration and plain decoding take turns on held-out prompts, repeat by repeat, until the verdict is clear or
the repeats are used up. An interrupted run resumes. The exit code states the verdict: 0 confirmed, 3 weaker, 4 refuted.
``engines.json`` in place of ``best.json`` verifies the fastest engine, against the plain decoding that it was faster than.

The claim is ``confirmed`` if its evidence holds, up to the difference between machines and days, ``refuted`` by what noise
cannot explain, and ``weaker`` otherwise (docs/measuring.md). A claim above the interval is not refuted by other prompts than
those of its evidence, because categories differ more than machines do.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip import Export, Measurement, PromptSet, Target
from layerskip.export import attachment_digests
from layerskip.files import digest, write_json
from layerskip.measure.measurement import CONFIDENCE, MIN_RESAMPLED
from layerskip.models.environment import machine
from searches.app.application import NOT_CONFIRMED, run
from searches.app.checks import InputError, check_number, check_seed, check_whole
from searches.app.interrupt import interrupt_code
from searches.app.targets import command_line, load_exported_target
from searches.backends.backend import Workload
from searches.backends.selection import closing, described, exported_backend
from searches.engines.fastest import FastestBackend, FastestEngine
from searches.report.tables import as_markdown, conditions, empty_note, with_interval
from searches.results import ResultLog, record_header
from searches.study.bench import BASELINE, ModelBench, Row, resumed_rows
from searches.study.plan import check_prompts, flatten
from searches.training.texts import refuse_answers_of

EXIT_CODES = {"confirmed": 0, "weaker": 3, "refuted": NOT_CONFIRMED}
_CANDIDATE = "export"
_MAX_NEW_TOKENS = 48
_STALE = 6 * 3600  # seconds after which the rows of an interrupted run are discarded
_SEED_STEP = 1000  # between the seeds of two repeats, each of which counts up prompt by prompt
_ROUNDING = 1e-6
_MAX_SPEEDUP_PER_TOKEN = 1.1
"""Highest ratio of speedup to tokens per round. Noise and other kernels may make a round slightly faster than a step."""
_TOLERATED_ROUNDS = 0.1
"""Share by which tokens per round may fall, if near-ties change the texts. The speed of a machine does not change them."""
_SHOWN = ("tokens_per_second", "baseline_tokens_per_second", "acceptance_rate", "mean_acceptance_length")  # by a report


def _check_settings(measure: DictConfig) -> None:
    """Check ``measure`` of ``conf/verify.yaml``, where each setting is described."""
    check_whole("measure.max_repeats", measure.max_repeats)
    for name in ("max_new_tokens", "held_out_prompts"):
        if measure[name] is not None:
            check_whole(f"measure.{name}", measure[name])
    check_number("measure.tolerance", measure.tolerance, or_zero=True)
    if measure.tolerance >= 1:
        raise InputError(f"measure.tolerance: {measure.tolerance!r} is not below 1")


def verify(config: DictConfig) -> None:
    """Verify an export; ``conf/verify.yaml`` is the configuration. Exits with one of ``EXIT_CODES`` unless confirmed."""
    check_seed(config.seed)
    _check_settings(settings := config.measure)
    if OmegaConf.is_missing(config, "export"):
        raise InputError("export: is missing; name the file, as in python -m searches.verify best.json")
    fastest = FastestEngine.load(str(config.export))
    export = Export.load(str(config.export)) if fastest is None else fastest.export
    name = export.config.label() if fastest is None else fastest.name
    if fastest is not None and config.target.device == "auto":
        config.target.device = "cpu"  # on which engines decode
    max_new_tokens = settings.max_new_tokens or export.evidence.get("max_new_tokens", _MAX_NEW_TOKENS)
    check_whole("evidence.max_new_tokens", max_new_tokens)
    held_out: PromptSet = instantiate(config.prompts).split()[1]
    prompts = held_out.take(settings.held_out_prompts)
    claim = Claim.of(export, held_out, prompts, max_new_tokens)
    if len(prompts) < MIN_RESAMPLED:
        raise InputError(f"prompts: {len(prompts)} held-out prompts are too few; {MIN_RESAMPLED} are the least")
    target = load_exported_target(config.target, export)
    export.check(target)
    claim = dataclasses.replace(claim, repeatable=claim.repeatable and _is_alike(export, target))
    refuse_answers_of("config", export.config, target, prompts)
    check_prompts(prompts, target, max_new_tokens)
    if fastest is None:
        backend, workload = exported_backend(config, export, target)
    else:
        backend, workload = FastestBackend(target, fastest, Path(config.outputs) / "engines"), Workload()
    bench = ModelBench(backend, export.sampling, max_new_tokens, workload)
    asked = [export.config.to_dict(), attachment_digests(export.config), prompts.digest, config.seed, bench.conditions]
    unfinished = Path(config.outputs) / f"verify-{digest(asked)[:12]}.jsonl"
    measurement, verdict = None, judge_plain(claim.speedup)
    if export.config.method != "none" or (fastest is not None and fastest.name != fastest.base):
        if unfinished.exists() and time.time() - unfinished.stat().st_mtime > _STALE:
            unfinished.unlink()
        with closing(backend):
            measurement, verdict = _measure(bench, name, export, claim, prompts, config, unfinished)
    header = record_header("layerskip.verification/1", target)
    record = header | {
        "environment": header["environment"] | described(backend, workload),
        "verdict": verdict.name,
        "reason": verdict.reason,
        "export": str(config.export),
        "name": name,
        "config": export.config.to_dict(),
        "sampling": export.sampling.to_dict(),
        "claimed": None if claim.speedup is None else dataclasses.asdict(claim.speedup),
        "measured": None if measurement is None else measurement.to_dict(),
        "tolerance": settings.tolerance,
        "repeats": 0 if measurement is None else len(measurement.candidate) // len(prompts),
        "looks": settings.max_repeats,  # the interval holds for all of them together
        "seed": config.seed,
        "prompts": {"name": prompts.name, "count": len(prompts), "digest": prompts.digest},
        "max_new_tokens": max_new_tokens,
    }
    record["differences"] = differences(export, record)
    print(_report(record, export, measurement))
    file = Path(config.record or Path(config.outputs) / "verify.json")
    write_json(file, record)
    print(f"wrote {file}")
    unfinished.unlink(missing_ok=True)  # the next run measures again
    if verdict.name != "confirmed":
        sys.exit(EXIT_CODES[verdict.name])


def _is_alike(export: Export, target: Target) -> bool:
    """Return whether the export's outputs must repeat: same model, and in half precision a device of the same name."""
    device_name = export.environment.get("device_name")
    exact = target.dtype == "float32" or device_name == machine(target)["device_name"]
    return exact and dict(export.target).items() <= target.describe().items()


def _measure(
    bench: ModelBench, name: str, export: Export, claim: Claim, prompts: PromptSet, config: DictConfig, file: Path
) -> tuple[Measurement, Verdict]:
    """Measure an export against plain decoding until its claim can be judged or the repeats are used up.

    The file has the rows of an interrupted run, which are not measured again, and takes the new ones. An interrupt prints
    what is known, and ends the program.
    """
    log, rows, most = ResultLog(file), list[Row](), config.measure.max_repeats
    resumed = f"; {len(log)} of them were before an interruption ({file})" if len(log) else ""
    print(f"measuring {name} on {len(prompts)} prompts, at most {most} x{resumed}", flush=True)
    try:
        with tqdm(total=len(prompts) * most, unit="prompt", disable=None) as bar:
            for repeat in range(most):
                seed = config.seed + _SEED_STEP * repeat
                measure = partial(bench.compare, {_CANDIDATE: export.config}, repeats=1, seed=seed)
                for row in resumed_rows(measure, prompts, log, str(repeat)):
                    rows.append(row)
                    bar.update()
                found = Measurement.of(rows, BASELINE, _CANDIDATE)
                per_round, decoded = found.stats.mean_acceptance_length, found.decoded.prompts
                measured, lossless = Speedup.measured(found, most), found.lossless.verdict
                verdict = judge(claim, measured, lossless, config.measure.tolerance, per_round, decoded)
                if verdict.clear:
                    break
    except KeyboardInterrupt as error:
        if rows:
            print("\n".join(_table(export, Measurement.of(rows, BASELINE, _CANDIDATE), most)))
        print(f"interrupted after {len(rows)} prompts: no verdict; the same command resumes", file=sys.stderr)
        sys.exit(interrupt_code(error))
    return found, verdict


@dataclass(frozen=True)
class Speedup:
    """A ratio of tokens/s to plain decoding's, with its 95 % interval, which holds for all looks at it together."""

    value: float
    low: float
    high: float

    @classmethod
    def measured(cls, measurement: Measurement, looks: int) -> Speedup:
        """Return the speedup of a measurement that any of several looks may end, which widens the interval (Bonferroni)."""
        return cls(measurement.speedup, *measurement.interval(confidence=1 - (1 - CONFIDENCE) / looks))

    @classmethod
    def claimed(cls, evidence: Mapping[str, Any]) -> Speedup | None:
        """Return the speedup in an export's evidence; None if there is none. A value without interval is its interval."""
        names = ("speedup", "speedup_low", "speedup_high")
        values: list[Any] = [evidence.get(name) for name in names]
        if values == [None] * 3:
            return None
        if values[1:] == [None, None]:
            values = values[:1] * 3
        for name, number in zip(names, values, strict=True):
            check_number(f"evidence.{name}", number)
        speedup = cls(*map(float, values))
        if speedup.low > speedup.high:
            raise InputError(f"evidence.speedup_low: {speedup.low} is above speedup_high, {speedup.high}")
        return speedup

    @property
    def consistent(self) -> bool:
        """True if the value lies in its interval."""
        return self.low * (1 - _ROUNDING) <= self.value <= self.high * (1 + _ROUNDING)

    def __str__(self) -> str:
        return with_interval(self.value, self.low, self.high)


@dataclass(frozen=True)
class Claim:
    """The claim of an export.

    It is ``repeatable`` if greedy decoding of the same prompts must give as many tokens per round, up to near-ties and to
    drafters that learn from prompts in another order.
    """

    speedup: Speedup | None = None  # None claims only to be faster than plain decoding
    mean_acceptance_length: float | None = None  # if stated; no speedup can exceed it, as a round takes no less than a step
    other_work: bool = False  # whether its evidence is of other held-out prompts than now, or of another output length
    repeatable: bool = False

    @classmethod
    def of(cls, export: Export, held_out: PromptSet, prompts: PromptSet, max_new_tokens: int) -> Claim:
        """Return the claim of an export, of which some of all held-out prompts are measured now, with so many new tokens.

        Evidence is of the same work if it is of all held-out prompts, of the measured ones, or of as many as it states.
        Evidence that does not name its prompts is assumed to be of the same work.
        """
        evidence = export.evidence
        per_round, prompts_digest, count = map(evidence.get, ("mean_acceptance_length", "prompts_digest", "prompts"))
        same_length = evidence.get("max_new_tokens", max_new_tokens) == max_new_tokens
        same_work = [held_out, prompts, *([held_out.take(count)] if type(count) is int else [])]
        is_same = prompts_digest is None or prompts_digest in [part.digest for part in same_work]
        return cls(
            Speedup.claimed(evidence),
            per_round if isinstance(per_round, (int, float)) else None,
            other_work=not (same_length and is_same),
            repeatable=same_length and export.sampling.greedy and prompts_digest == prompts.digest,
        )

    @property
    def contradiction(self) -> str | None:
        """A contradiction within the evidence; None if there is none."""
        claimed, per_round = self.speedup, self.mean_acceptance_length
        if claimed is not None and not claimed.consistent:
            return f"the speedup {claimed} lies outside its own interval"
        if claimed is not None and per_round is not None and claimed.value > _MAX_SPEEDUP_PER_TOKEN * per_round:
            return f"{claimed.value:.2f} x is more than {per_round:.2f} tokens per round allow"
        return None


@dataclass(frozen=True)
class Verdict:
    """A verdict with its reason in one sentence; it is not clear while further repeats may change it."""

    name: Literal["confirmed", "weaker", "refuted"]
    reason: str
    clear: bool = True


def judge(
    claim: Claim,
    measured: Speedup,
    losslessness: str,
    tolerance: float,
    mean_acceptance_length: float | None = None,
    prompts: int = MIN_RESAMPLED,
) -> Verdict:
    """Compare a claim with a new measurement: its speedup, tokens per round (None skips these) and prompts with a speed.

    ``losslessness`` is the verdict of :class:`layerskip.measure.losslessness.Losslessness` on the new outputs. ``tolerance``
    is the share of the claimed speedup that machines and days may differ by, in [0, 1).
    """
    claimed = claim.speedup
    if losslessness == "different":
        return Verdict("refuted", "the output differs from plain decoding.")
    if losslessness == "unchecked":
        return Verdict("weaker", "every output ended with its first token, so that nothing was compared.", clear=False)
    if claim.contradiction is not None:
        return Verdict("refuted", f"the evidence contradicts itself: {claim.contradiction}.")
    before, now = claim.mean_acceptance_length if claim.repeatable else None, mean_acceptance_length
    if before is not None and now is not None and now < before * (1 - _TOLERATED_ROUNDS):
        rounds = f"{before:.2f} tokens per round claimed, {now:.2f} measured on the same prompts"
        return Verdict("refuted", f"{rounds}; the machine cannot cause this difference.")
    if 0 < prompts < MIN_RESAMPLED:
        few = f"the outputs of only {prompts} prompts go on after their first token; {MIN_RESAMPLED} are the least."
        return Verdict("weaker", few, clear=False)
    found = f"measured {measured}"
    if claim.other_work:
        found += " on other prompts or lengths than the evidence's (prompts= and measure.max_new_tokens= choose them)"
    if measured.high < 1:
        return Verdict("refuted", f"slower than plain decoding: {found}.")
    if claimed is not None and measured.high < claimed.low * (1 - tolerance) and not claim.other_work:
        return Verdict("refuted", f"the claim is out of reach: {found}, claimed {claimed}.")
    if measured.low <= 1:
        return Verdict("weaker", f"not significantly faster than plain decoding: {found}.", clear=False)
    if claimed is None:
        return Verdict("confirmed", f"faster than plain decoding, as claimed: {found}.")
    # Few or mixed prompts give intervals that are wide enough for nearly any claim, so the value counts, too.
    if measured.high < claimed.low or measured.value < claimed.value * (1 - tolerance):
        reason = f"faster than plain decoding, but less than claimed: {found}, claimed {claimed}."
        return Verdict("weaker", reason, clear=measured.high < claimed.low)
    return Verdict("confirmed", f"{found}, claimed {claimed}.")


def judge_plain(claim: Speedup | None) -> Verdict:
    """Return the verdict on an export without drafting, which needs no measurement."""
    if claim is not None and not (claim.consistent and abs(claim.value - 1) <= _ROUNDING):
        return Verdict("refuted", f"the evidence contradicts itself: it states a speedup of {claim} for plain decoding.")
    return Verdict("confirmed", "no drafting is plain decoding itself: its output cannot differ, nothing is measured.")


def differences(export: Export, conditions: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the conditions that differ from the export's: ``field``, ``exported`` and ``now`` of each."""
    now = {
        "target": conditions["target"],
        "environment": conditions["environment"],
        "evidence": {"prompts_digest": conditions["prompts"]["digest"], "max_new_tokens": conditions["max_new_tokens"]},
    }
    evidence = {name: export.evidence[name] for name in now["evidence"] if name in export.evidence}
    exported = {"quantization": None} | dict(export.target)
    before = flatten({"target": exported, "environment": dict(export.environment), "evidence": evidence})
    present = flatten(now)
    changed = {name: present.get(name) for name, old in before.items() if old != present.get(name)}
    return [{"field": name, "exported": str(before[name]), "now": str(new)} for name, new in changed.items()]


def _report(record: Mapping[str, Any], export: Export, measurement: Measurement | None) -> str:
    """Return a record as Markdown."""
    lines = [f"{record['verdict']}: {record['reason']}", ""]
    if measurement is not None:
        lines += [*_table(export, measurement, record["looks"]), *empty_note(record["measured"]), ""]
        lines += [f"{record['name']} on {conditions(record)}", ""]
    if record["differences"]:
        changed = [f"- {each['field']}: {each['exported']}, now {each['now']}" for each in record["differences"]]
        lines += ["Different from the export:", "", *changed]
    elif export.environment:
        lines.append("Same model, machine, versions and prompts as the export's.")
    if not export.environment:
        lines.append("The export does not state where it was measured.")
    return "\n".join(lines) + "\n"


def _table(export: Export, measurement: Measurement, looks: int) -> list[str]:
    """Return claimed and measured metrics as the lines of a Markdown table."""
    metrics, evidence = measurement.to_dict(), export.evidence
    measured = Speedup.measured(measurement, looks) if measurement.decoded.candidate else None
    rows: list[tuple[str, Any, Any]] = [("speedup", Speedup.claimed(evidence), measured)]
    rows += [(name.replace("_", " "), evidence.get(name), metrics[name]) for name in _SHOWN]
    rows.append(("output", None, metrics["losslessness"]["verdict"].replace("_", "-")))
    rows += [(f"speedup, {category}", None, value) for category, value in metrics["speedup_by_category"].items()]
    return as_markdown([{"": name, "claimed": _shown(claimed), "measured": _shown(now)} for name, claimed, now in rows])


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.argv[1:] = command_line(sys.argv[1:])
    run("verify", verify)
