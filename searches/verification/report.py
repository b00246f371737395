"""The report of a verification: claimed and measured figures, and everything that differs from the export's conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from layerskip import Export, Measurement
from searches.study.empty_outputs import empty_note
from searches.verification.claim import Speedup

_CHANGED = 1.2  # factor; on one machine the ratio usually repeats within an eighth


def differences(export: Export, conditions: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the conditions that differ from the export's: ``field``, ``exported`` and ``now`` of each."""
    now = {
        "target": conditions["target"],
        "environment": conditions["environment"],
        "evidence": {"prompts_digest": conditions["prompts"]["digest"], "max_new_tokens": conditions["max_new_tokens"]},
    }
    evidence = {name: export.evidence[name] for name in now["evidence"] if name in export.evidence}
    exported = {"quantization": None} | dict(export.target)
    before = {"target": exported, "environment": export.environment, "evidence": evidence}
    return [{"field": name, "exported": str(old), "now": str(new)} for name, old, new in _differing(before, now)]


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, old in before.items():
        new = now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differing(old, new, f"{prefix}{name}.")
        elif old != new:
            yield prefix + name, old, new


def compute_speed_change(export: Export, record: Mapping[str, Any]) -> str | None:
    """Return a sentence if the machine's arithmetic, compared with its memory, is faster or slower than for the export.

    A step of plain decoding is bound by memory bandwidth. Prefill and the verification of drafts are bound by arithmetic. If
    only arithmetic is slower, for example because of other load on the machine, drafts gain less, but plain decoding's
    tokens/s do not show it.
    """
    work = export.evidence.get("prompts_digest"), export.evidence.get("max_new_tokens")
    if work != (record["prompts"]["digest"], record["max_new_tokens"]):
        return None
    before, now = _prefill_share(export.evidence), _prefill_share(record["measured"])
    if before is None or now is None or 1 / _CHANGED < now / before < _CHANGED:
        return None
    speed, gain = ("faster", "more") if now < before else ("slower", "less")
    return (
        f"Prefill took {before:.3f} of plain decoding's time for the export, and {now:.3f} now. Compared with its memory, "
        f"this machine computes {speed}, and drafts gain {gain}."
    )


def _prefill_share(figures: Mapping[str, Any]) -> float | None:
    """Return the time of prefill as a share of plain decoding's; None if the figures do not contain both."""
    prefill, decoding = figures.get("baseline_prefill_seconds"), figures.get("baseline_decode_seconds")
    if isinstance(prefill, float) and isinstance(decoding, float) and prefill > 0 and decoding > 0:
        return prefill / decoding
    return None


def report(record: Mapping[str, Any], export: Export, measurement: Measurement | None) -> str:
    """Return a record as Markdown: the verdict, claimed and measured figures, and changed conditions."""
    lines = [f"{record['verdict']}: {record['reason']}", ""]
    if measurement is not None:
        lines += [*table(export, measurement, record["looks"]), *empty_note(record["measured"]), ""]
        where, prompts, versions = record["environment"], record["prompts"], record["environment"]["versions"]
        lines += [
            f"{export.config.label()} on {record['target']['name']} in {record['target']['dtype']} on {where['device']} "
            f"({where['device_name']}, {where['threads']} threads), {prompts['count']} prompts ({prompts['name']}) "
            f"x {record['repeats']}, {record['max_new_tokens']} new tokens, torch {versions['torch']}, "
            f"transformers {versions['transformers']}, {record['date']}.",
            "",
        ]
        if (change := compute_speed_change(export, record)) is not None:
            lines += [change, ""]
    changed = [f"- {each['field']}: {each['exported']}, now {each['now']}" for each in record["differences"]]
    if changed:
        lines += ["Different from the export:", "", *changed]
    elif export.environment:
        lines.append("Same model, machine, versions and prompts as the export's.")
    if not export.environment:
        lines.append("The export does not state where it was measured.")
    return "\n".join(lines) + "\n"


def table(export: Export, measurement: Measurement, looks: int) -> list[str]:
    """Return claimed and measured figures as the lines of a Markdown table."""
    figures, evidence = measurement.to_dict(), export.evidence
    rows: list[tuple[str, Any, Any]] = [
        (
            "speedup",
            Speedup.claimed(evidence),
            Speedup.measured(measurement, looks) if measurement.decoded.candidate else None,
        ),
        *((name.replace("_", " "), evidence.get(key), figures[key]) for name, key in _FIGURES.items()),
        ("output", _part(evidence, "losslessness").get("verdict"), figures["losslessness"]["verdict"]),
    ]
    for category, value in figures["speedup_by_category"].items():
        rows.append((f"speedup, {category}", _part(evidence, "speedup_by_category").get(category), value))
    lines = ["| | claimed | measured |", "|---|---|---|"]
    return lines + [f"| {name} | {_shown(claimed)} | {_shown(measured)} |" for name, claimed, measured in rows]


_FIGURES = {
    "tokens/s": "tokens_per_second",
    "plain tokens/s": "baseline_tokens_per_second",
    "acceptance": "acceptance_rate",
    "tokens/round": "tokens_per_round",
}


def _part(evidence: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping in the evidence; empty if the evidence has something else there."""
    part = evidence.get(name)
    return part if isinstance(part, Mapping) else {}


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value).replace("_", "-")
