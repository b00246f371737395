"""EAGLE heads compared with bridged masks: draft cost, and agreement of the first drafted token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from layerskip import SpeculativeConfig, StopRule, Target
from layerskip.heads.eagle import EagleHead, load_eagle, read_modules
from layerskip.heads.feature_store import extract_features
from layerskip.heads.readout import Readout
from layerskip.heads.training import Batch, predict_tokens, stored_modules
from layerskip.texts.continuations import Continuation
from searches.study.bench import BASELINE, Row

CHAIN = "eagle"


def eagle_configs(head: str) -> dict[str, SpeculativeConfig]:
    """Return the configurations of a head that are measured, by name: chains with a confidence threshold, and trees."""
    return {
        CHAIN: SpeculativeConfig("eagle", 4, head=head, stop=StopRule("threshold", 0.5), candidates=1),
        "eagle_tree": SpeculativeConfig("eagle", 3, head=head, candidates=4, tree_tokens=8, least_probability=0.05),
    }


def eagle_point(folder: str, target: Target, scanned: Sequence[Continuation], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the point of an EAGLE head for comparison with bridged masks.

    Args:
        folder: folder of the head.
        target: target of the head.
        scanned: continuations on which masks are scanned.
        rows: measured held-out prompts, :data:`CHAIN` among the configurations.

    Returns:
        ``agreement`` of the first drafted token, restricted as in decoding to the head's tokens and those in the text so
        far; ``draft_cost``, the measured time of a drafted token in steps of plain decoding, including its share of reading
        the target's features; ``training_seconds`` and training ``positions``, None if unknown.
    """
    path = Path(folder) / "head.json"  # published EAGLE checkpoints have none
    training = json.loads(path.read_text(encoding="utf-8"))["training"] if path.is_file() else {}
    samples, plain = [row[CHAIN] for row in rows], [row[BASELINE] for row in rows]
    step = sum(s.decode_seconds for s in plain) / max(1, sum(s.decoded_tokens for s in plain))
    drafted = sum(r.drafted for sample in samples for r in sample.stats.rounds)
    return {
        "draft_cost": sum(s.draft_seconds for s in samples) / max(1, drafted) / step,
        "agreement": first_token_agreement(load_eagle(folder, target).float(), target, scanned),
        "training_seconds": training.get("seconds"),
        "positions": training.get("positions"),
    }


@torch.no_grad()
def first_token_agreement(head: EagleHead, target: Target, continuations: Sequence[Continuation]) -> float:
    """Return how often the first drafted token of a head is the target's, over all positions where a draft can start."""
    modules = stored_modules(head.shape.modules, *read_modules(target))
    embeddings, readout = target.model.get_input_embeddings(), Readout(target, None)
    excluded = torch.zeros(target.vocabulary, dtype=torch.bool, device=target.device)
    if head.tokens is not None:
        excluded[:] = True
        excluded[head.tokens] = False
    right = total = 0
    for continuation in continuations:
        text = extract_features(target, (*continuation.prompt, *continuation.tokens), len(continuation.prompt), modules)
        for prediction in predict_tokens(head, embeddings, Batch.of([text], head), 1):
            logits = readout(prediction.hidden.to(target.model.dtype))
            places = (prediction.mask[0].nonzero()[:, 0] + 2).tolist()  # row i predicts token i + 2
            for place, row, token in zip(places, logits, prediction.tokens.tolist(), strict=True):
                start = place - text.begin - 1
                if not 0 <= start < continuation.starts or continuation.limit(start) < 1:
                    continue
                unseen = excluded.clone()
                unseen[text.tokens[:place].to(target.device)] = False
                right += int(row[: target.vocabulary].masked_fill(unseen, -float("inf")).argmax()) == token
                total += 1
    return right / max(1, total)
