"""Trained parts: bridges in place of skipped layers, EAGLE heads and Medusa heads."""

from __future__ import annotations

from collections.abc import Iterator

from pages.markdown import anchor, table
from pages.results.benchmarks import BESIDE_PLAIN, BESIDE_PLAIN_RECORD
from pages.results.figures import describe, ranged
from pages.results.overrides import EAGLE_TRAINING, LARGE_FIT, MEDUSA_TRAINING, OWN_TEXTS
from pages.results.records import Record, conditions, link, stated
from pages.results.section import Section

LEAST_BRIDGED, LEAST_OVER_EMPTY = 1.15, 1.2
"""The aims: speedup over plain decoding, and over the best empty skip."""

BRIDGES = {"empty": "empty skip", "mean": "mean", "linear": "affine map", "trained": "trained MLP"}


def sections() -> Iterator[Section]:
    yield Section(
        "Bridges on SmolLM2-135M",
        "Layer skips with a bridge in place of the skipped run, beside empty skips and an EAGLE head that is trained"
        " as long.",
        _bridges("bridges-smollm2-2-cores.json"),
        [
            f"searches.train drafter=eagle tokens=90_000 vocabulary=16384 max_seconds=580 lookback=0 {EAGLE_TRAINING}"
            " head=outputs/eagle_beside",
            "searches.bridges masks=[layers:2-18,layers:2-16,layers:2-10,layers:2-13,layers:2-21,layers:2-27] siblings=3"
            f" contenders=3 depth=4 tokens=90_000 max_seconds=580 save_seconds=120 trained.width=1536 {LARGE_FIT}"
            " measure.prompts=16 measure.max_new_tokens=64 scan.profile_repeats=24 eagle_head=outputs/eagle_beside",
        ],
        ["Finalists within 1 % of each other tie, and the simplest of them is exported."],
    )
    yield Section(
        "Bridges on Gemma 3 270M",
        "The same on Gemma 3 270M, with one run of layers.",
        _bridges("bridges-gemma3-2-cores.json"),
        [
            "make gemma",
            "searches.bridges target=gemma3 masks=[layers:2-8] kinds=[linear] max_seconds=240 depth=4 tokens=36_000"
            f" vocabularies=[16384] trained.width=1024 calibration_bytes=2_000_000_000 {OWN_TEXTS} scan.profile_repeats=6"
            " contenders=1 measure.prompts=4 measure.held_out_prompts=12",
        ],
    )
    yield Section(
        "Trained heads",
        "EAGLE and Medusa heads of SmolLM2-135M, trained on texts that the model wrote itself.",
        _heads("heads-smollm2-2-cores.json"),
        [
            f"searches.train drafter=eagle tokens=100_000 vocabulary=16384 max_seconds=1100 {EAGLE_TRAINING}"
            " head=outputs/eagle_copies",
            f"searches.train drafter=medusa tokens=100_000 vocabulary=16384 {MEDUSA_TRAINING} head=outputs/medusa",
            f"searches.train drafter=eagle tokens=90_000 vocabulary=16384 max_seconds=580 {EAGLE_TRAINING}"
            " head=outputs/eagle_beside",
        ],
        [
            "The second and third rates count positions where all earlier drafted tokens are right.",
            "`eagle_copies_again` and `medusa_again` come from the first two commands, run once more. `medusa` had"
            " `tokens=120_000`. The `eagle_beside` of the [bridges](#bridges-on-smollm2-135m) is another head, with"
            " `lookback=0`.",
        ],
    )


def _bridges(name: str) -> list[str]:
    record = Record(name)
    prompts, over, eagle = record["prompts"], record["over_empty"], record["eagle"]
    lines = [*_agreement(record), ""]
    if eagle:
        right, cost = f"{eagle['agreement']:.2f}", f"{eagle['draft_cost']:.2f}"
        lines += [f"The EAGLE head is right {right} of the time and costs {cost} steps.", ""]
    rows = []
    for key, found in record["measured"].items():
        predicted = "" if found["predicted"] is None else f"{found['predicted']:.2f}"
        best = "the best empty skip" if key == over["empty"] else ranged(over[key], "ratio") if key in over else ""
        figures = [ranged(found), predicted, f"{found['acceptance_rate']:.2f}", best]
        rows.append([key, describe(found["config"]), *figures])
    head = ["decoding", "configuration", "speedup (95 %)", "predicted", "acceptance", "speedup over the best empty skip"]
    work = f"{prompts['scanned']} prompts scanned, {prompts['held_out']} held-out prompts decoded"
    work += f", {record['max_new_tokens']} new tokens, {record['trained']['seconds']} s of training a mask"
    winner = next(key for key, found in record["measured"].items() if found["config"] == record["winner"])
    met = record["measured"][winner]["speedup"] >= LEAST_BRIDGED
    met = met and over.get(winner, {"ratio": 0.0})["ratio"] >= LEAST_OVER_EMPTY
    aim = f"a speedup of {LEAST_BRIDGED} over plain decoding and of {LEAST_OVER_EMPTY} over the best empty skip"
    lines += ["Decoded side by side on held-out prompts:", "", *table(head, rows), *conditions(work, record)]
    lines += [f"- *{winner}* is exported. The aim is {aim}, which it {'meets' if met else 'misses'}."]
    if eagle:
        results = Record(BESIDE_PLAIN_RECORD)["results"]
        lines.append(
            f"- The EAGLE head here has the published form (`lookback=0`). In the [first table](#{anchor(BESIDE_PLAIN)}),"
            f" `eagle` with the default form has a speedup of {results['eagle']['speedup']:.2f} and `bridged` of"
            f" {results['bridged']['speedup']:.2f}."
        )
    return lines


def _agreement(record: Record) -> list[str]:
    """How good and how costly the drafts of each kind of bridge are."""
    points = {(p["mask"], p["bridge"]): p for p in record["points"] if p["tokens"] is None}
    kinds = [kind for kind in BRIDGES if any(kind == key for _, key in points)]
    rows = []
    for mask in sorted({mask for mask, _ in points}, key=lambda mask: int(mask.rsplit("-", 1)[1])):
        agreements = [f"{points[mask, kind]['agreement']:.2f}" for kind in kinds]
        cost = ", ".join(f"{points[mask, kind]['draft_cost']:.2f}" for kind in ("empty", "trained"))
        rows.append([f"`{mask}`", *agreements, cost, str(points[mask, "trained"]["fit"]["steps"])])
    return [
        "How often the first drafted token is right on the scanned prompts, and what a draft pass costs in steps of plain"
        " decoding:",
        "",
        *table(["skipped", *(BRIDGES[kind] for kind in kinds), "cost: empty, trained", "steps of training"], rows),
    ]


def _heads(name: str) -> list[str]:
    heads = Record(name)
    rows = []
    for key, head in heads.items():
        training = head["training"]
        rates = [", ".join(f"{rate:.2f}" for rate in training[texts]) for texts in ("held_out", "spared")]
        counts = [f"{training['positions']:,}", str(training["steps_done"]), f"{training['seconds']:.0f}"]
        counts += [str(training["max_seconds"]), str(training["lookback"]) if head["kind"] == "eagle" else ""]
        rows.append([f"`{key}`", head["kind"], *rates, *counts])
    columns = ["head", "kind", "1st, 2nd, 3rd token right on held-out prompts", "on texts like its training texts"]
    columns += ["positions", "steps", "seconds of training", "`max_seconds`", "`lookback`"]
    dtypes = ", ".join({head["target"]["dtype"]: "" for head in heads.values()})
    return [*table(columns, rows), *stated(dtypes, "device, versions, date and commit not recorded", link(name))]
