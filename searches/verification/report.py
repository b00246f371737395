"""What was claimed of an export beside what was measured, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from layerskip import Export, Measurement
from searches.verification.claim import Speedup

_MOVED = 1.2  # times what it was; on one machine it has come again within an eighth, but for such hours


def differences(export: Export, conditions: Mapping[str, Any]) -> list[dict[str, str]]:
    """What is not as it was when the export was made: ``field``, ``exported`` and ``now`` of each."""
    now = {
        "target": conditions["target"],
        "environment": conditions["environment"],
        "evidence": {"prompts_digest": conditions["prompts"]["digest"], "max_new_tokens": conditions["max_new_tokens"]},
    }
    evidence = {name: export.evidence[name] for name in now["evidence"] if name in export.evidence}
    before = {"target": export.target, "environment": export.environment, "evidence": evidence}
    return [{"field": name, "exported": str(old), "now": str(new)} for name, old, new in _differing(before, now)]


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, old in before.items():
        new = now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differing(old, new, f"{prefix}{name}.")
        elif old != new:
            yield prefix + name, old, new


def pace(export: Export, record: Mapping[str, Any]) -> str | None:
    """How fast the machine reads beside how fast it decodes, if that is not as it was for the export; None if it is.

    A step of plain decoding waits for memory, reading a prompt for arithmetic, as does verifying drafts. Where arithmetic
    alone is slower than it was, a neighbour's doing perhaps, drafts pay less, and plain decoding's tokens/s do not show it.
    """
    work = export.evidence.get("prompts_digest"), export.evidence.get("max_new_tokens")
    if work != (record["prompts"]["digest"], record["max_new_tokens"]):
        return None
    before, now = _reading(export.evidence), _reading(record["measured"])
    if before is None or now is None or 1 / _MOVED < now / before < _MOVED:
        return None
    drafts = "more" if now < before else "less"
    return (
        f"Reading the prompts took {before:.3f} of the time that plain decoding took, and takes {now:.3f} now: beside its "
        f"memory this machine computes {'faster' if now < before else 'slower'}, and drafts are worth {drafts}."
    )


def _reading(figures: Mapping[str, Any]) -> float | None:
    """What reading prompts took of the time that plain decoding took; None where the figures, anybody's, do not say."""
    read, decoded = figures.get("baseline_prefill_seconds"), figures.get("baseline_decode_seconds")
    if isinstance(read, float) and isinstance(decoded, float) and read > 0 and decoded > 0:
        return read / decoded
    return None


def report(record: Mapping[str, Any], export: Export, measurement: Measurement | None) -> str:
    """A record as Markdown: the verdict, what was claimed beside what was measured, and what else has changed."""
    lines = [f"{record['verdict']}: {record['reason']}", ""]
    if measurement is not None:
        lines += [*table(export, measurement, record["looks"]), ""]
        where, prompts, versions = record["environment"], record["prompts"], record["environment"]["versions"]
        lines += [
            f"{export.config.label()} on {record['target']['name']} in {record['target']['dtype']} on {where['device']} "
            f"({where['device_name']}, {where['threads']} threads), {prompts['count']} prompts ({prompts['name']}) "
            f"x {record['repeats']}, {record['max_new_tokens']} new tokens, torch {versions['torch']}, "
            f"transformers {versions['transformers']}, {record['date']}.",
            "",
        ]
        if (moved := pace(export, record)) is not None:
            lines += [moved, ""]
    changed = [f"- {found['field']}: {found['exported']}, now {found['now']}" for found in record["differences"]]
    if changed:
        lines += ["Not as it was for the export:", "", *changed]
    elif export.environment:
        lines.append("Same model, machine, versions and prompts as the export's.")
    if not export.environment:
        lines.append("The export does not say where it was measured.")
    return "\n".join(lines) + "\n"


def table(export: Export, measurement: Measurement, looks: int) -> list[str]:
    """What was claimed beside what was measured, as the lines of a Markdown table."""
    found, said = measurement.to_dict(), export.evidence
    rows: list[tuple[str, Any, Any]] = [
        ("x plain", Speedup.claimed(said), Speedup.measured(measurement, looks)),
        *((name.replace("_", " "), said.get(key), found[key]) for name, key in _FIGURES.items()),
        ("output", _table(said, "losslessness").get("verdict"), found["losslessness"]["verdict"]),
    ]
    for category, value in found["speedup_by_category"].items():
        rows.append((f"x plain, {category}", _table(said, "speedup_by_category").get(category), value))
    lines = ["| | claimed | measured |", "|---|---|---|"]
    return lines + [f"| {name} | {_shown(claimed)} | {_shown(measured)} |" for name, claimed, measured in rows]


_FIGURES = {
    "tokens/s": "tokens_per_second",
    "plain tokens/s": "baseline_tokens_per_second",
    "acceptance": "acceptance_rate",
    "tokens/round": "tokens_per_round",
}


def _table(evidence: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the evidence, which anybody may have written."""
    part = evidence.get(name)
    return part if isinstance(part, Mapping) else {}


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value).replace("_", "-")
