"""Predictions of scans and of cost profiles, beside real decoding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from pages.markdown import table
from pages.results.exports import MOST_TRIALS
from pages.results.figures import aims, percent
from pages.results.records import Record, conditions, link
from pages.results.section import Section

LEAST_CORRELATION, MOST_ERROR = 0.9, 0.03  # aims for predicted speedups
MOST_LONG_ERROR = 0.05  # aim for speedups at a long context, from costs at other ones


def sections() -> Iterator[Section]:
    yield Section(
        "Scans against the real decoder",
        "Rounds, drafted tokens and accepted tokens that a scan predicts, compared with real decoding, round by round.",
        _exactness(*(f"exactness-{lengths}-smollm2-2-cores.json" for lengths in ("other-lengths", "length-4", "length-8"))),
        [f"OMP_NUM_THREADS=1 searches.evaluate.exactness lengths=[{lengths}]" for lengths in ("1,2,3,5,6,7", "4", "8")],
    )
    yield Section(
        "Predicted against measured speedups",
        "Speedups of layer skipping that scans and a cost profile predict, beside those of real decoding.",
        _predictions("predictions-smollm2-2-cores.json", "predictions-float32-smollm2-2-cores.json"),
        [f"OMP_NUM_THREADS=1 searches.evaluate.predictions target.dtype={dtype}" for dtype in ("bfloat16", "float32")],
        ["*Rounds known* is the error where the real rounds are given. It is the error of the cost profile alone."],
    )
    yield Section(
        "Long contexts",
        "Time and peak memory of prompts of several lengths on two small random models, one of them with a window of 1,024"
        " tokens in every other layer; and speedups of layer skipping predicted between two measured contexts.",
        _long_context("long-context-2-cores.json"),
        ["OMP_NUM_THREADS=1 searches.evaluate.long_context"],
        [
            "Peak memory is that of all tensors beside the weights, the cache included. It grows with the prompt, not with"
            " its square, where the memory per prompt token does not grow.",
            "Rounds are those of real decoding, so that the error is that of the costs.",
        ],
    )


def _exactness(*names: str) -> list[str]:
    records = [Record(name) for name in names]
    counts = ("decodings", "rounds", "drafted", "accepted")
    rows, counted = [], []
    for record in records:
        sums = [sum(mask[count] for mask in record["masks"]) for count in counts]
        counted.append([*sums, len(record["differing"])])
        masks = [", ".join(map(str, record["draft_lengths"])), str(len(record["masks"]))]
        rows.append([*masks, *(f"{count:,}" for count in counted[-1]), record.measured_at(), link(record.name)])
    rows.append(["**all**", "", *(f"**{sum(column):,}**" for column in zip(*counted, strict=True)), "", ""])
    head = ["draft lengths", "masks", *counts, "that differ", "date, commit", "record"]
    thresholds = ", ".join(map(str, records[0]["thresholds"]))
    prompts = f"{records[0]['prompts']['count']} prompts, {records[0]['max_new_tokens']} new tokens"
    return [*table(head, rows), *conditions(f"{prompts}, stop thresholds {thresholds}, greedy", *records)]


def _predictions(*names: str) -> list[str]:
    records = [Record(name) for name in names]
    rows, missed = [], []
    for record in records:
        dtype, trials, correlation = record["target"]["dtype"], record["scan"]["trials"], record["spearman"]
        error, known = (record[f"median_absolute_error{of}"] for of in ("", "_from_real_rounds"))
        varied = [str(len({point[part] for point in record["points"]})) for part in ("mask", "draft_length")]
        figures = [f"{correlation:.3f}", percent(error, 1), percent(known, 1), f"{trials:.1f}"]
        rows.append([dtype, *varied, *figures, record.measured_at(), link(record.name)])
        missed += [f"the correlation in {dtype}"] if correlation < LEAST_CORRELATION else []
        missed += [f"the error in {dtype}"] if error > MOST_ERROR else []
        missed += [f"the cost of scans in {dtype}"] if trials > MOST_TRIALS else []
    head = ["dtype", "masks", "draft lengths", "rank correlation", "median error", "median error, rounds known"]
    head += ["64 scans, in whole trials", "date, commit", "record"]
    measured = [point["measured"] for record in records for point in record["points"]]
    prompts = f"{records[0]['prompts']['count']} prompts, {records[0]['max_new_tokens']} new tokens, greedy"
    return [
        *table(head, rows),
        *conditions(prompts, *records),
        f"- The aims are a rank correlation of at least {LEAST_CORRELATION}, a median error of at most"
        f" {percent(MOST_ERROR)} and scans that cost at most {MOST_TRIALS:.0f} whole trials. {aims(missed)}",
        f"- Of the {len(measured)} measured speedups, {sum(speedup > 1 for speedup in measured)} are above 1.",
    ]


def _long_context(name: str) -> list[str]:
    record = Record(name)
    lines: list[str] = []
    head = ["prompt, tokens", "prefill", "per prompt token", "per new token", "peak memory", "per prompt token"]
    for model, rows in record["rows"].items():
        shown = []
        for row in rows:
            tokens, prefill, peak = row["tokens"], row["prefill_seconds"], row["peak_bytes"]
            times = [f"{prefill:.2f} s", f"{1e6 * prefill / tokens:.0f} µs", f"{1000 * row['step_seconds']:.2f} ms"]
            shown.append([f"{tokens:,}", *times, f"{peak / 2**20:.0f} MB", f"{peak / tokens / 2**10:.1f} KB"])
        lines += ["", f"Model `{model}`:", "", *table(head, shown)]
    shown, errors = [], []
    for model, point in ((model, point) for model, points in record["points"].items() for point in points):
        errors.append(point["predicted"] / point["measured"] - 1)
        measured, predicted, shortest = (f"{point[key]:.3f}" for key in ("measured", "predicted", "from_shortest"))
        shown.append([f"`{model}`", f"`{point['mask']}`", measured, predicted, f"{100 * errors[-1]:+.1f} %", shortest])
    head = ["model", "skipped", "measured", "predicted", "error", f"with the costs of {min(record['profiled_contexts']):,}"]
    contexts = " and ".join(f"{context:,}" for context in record["profiled_contexts"])
    missed = ["the error"] if max(map(abs, errors)) > MOST_LONG_ERROR else []
    what = f"{record['new_tokens']} new tokens, medians of {record['repeats']} decodings, drafts of {record['draft_length']}"
    return [
        *lines,
        "",
        f"Speedups at a context of {record['predicted_context']:,}, predicted from costs at {contexts}:",
        "",
        *table(head, shown),
        *conditions(what, record),
        *(f"- {_growth(model, rows)}" for model, rows in record["rows"].items()),
        f"- The aim is an error of at most {percent(MOST_LONG_ERROR)}. {aims(missed)}",
    ]


def _growth(model: str, rows: Sequence[Mapping[str, float]]) -> str:
    """How much time and memory a further prompt token costs between neighbouring lengths."""
    ranges = []
    for key, unit, digits in (("step_seconds", 1e6, 2), ("peak_bytes", 1 / 2**10, 1)):
        pairs = itertools.pairwise(rows)
        slopes = [unit * (more[key] - less[key]) / (more["tokens"] - less["tokens"]) for less, more in pairs]
        ranges.append(f"{min(slopes):.{digits}f} to {max(slopes):.{digits}f}")
    return f"A further prompt token adds {ranges[0]} µs per new token and {ranges[1]} KB of memory (`{model}`)."
