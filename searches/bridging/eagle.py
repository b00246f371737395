"""How does an EAGLE head draft where masks are scanned? Its first token's agreement, by the scans' ruler, and its price."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from layerskip import SpeculativeConfig, StopRule, Target
from layerskip.heads.eagle import EagleHead, load_eagle, read_modules
from layerskip.heads.feature_store import think
from layerskip.heads.readout import Readout
from layerskip.heads.training import Batch, foretell, stored_modules
from layerskip.texts.continuations import Continuation
from searches.study.bench import BASELINE, Row

CHAIN = "eagle"


def eagle_configs(head: str) -> dict[str, SpeculativeConfig]:
    """Chains that end where the head is unsure, and trees: who competes, by name."""
    return {
        CHAIN: SpeculativeConfig("eagle", 4, head=head, stop=StopRule("threshold", 0.5), candidates=1),
        "eagle_tree": SpeculativeConfig("eagle", 3, head=head, candidates=4, tree_tokens=8, least_probability=0.05),
    }


def eagle_beside(folder: str, target: Target, scanned: Sequence[Continuation], rows: Sequence[Row]) -> dict[str, Any]:
    """A point beside those of masks.

    Args:
        folder: the head's.
        target: whose it is.
        scanned: what masks are scanned on.
        rows: held-out prompts, decoded by :data:`CHAIN` among others.

    Returns:
        ``agreement`` of the first token, drafted from the common tokens and those said before, as decoding has it;
        ``draft_cost``, what a drafted token took there in steps of plain decoding, with its share of reading the target's
        states; and what the head learnt from.
    """
    about = Path(folder) / "head.json"  # one in its authors' layout has none
    training = json.loads(about.read_text(encoding="utf-8"))["training"] if about.is_file() else {}
    samples, plain = [row[CHAIN] for row in rows], [row[BASELINE] for row in rows]
    each = sum(s.decode_seconds for s in plain) / max(1, sum(s.decoded_tokens for s in plain))
    drafted = sum(r.drafted for sample in samples for r in sample.stats.rounds)
    return {
        "draft_cost": sum(s.draft_seconds for s in samples) / max(1, drafted) / each,
        "agreement": first_agreement(load_eagle(folder, target).float(), target, scanned),
        "training_seconds": training.get("seconds"),
        "positions": training.get("positions"),
    }


@torch.no_grad()
def first_agreement(head: EagleHead, target: Target, continuations: Sequence[Continuation]) -> float:
    """How often a head's first token is the target's own, at all positions of continuations where a draft may begin."""
    modules = stored_modules(head.shape.modules, *read_modules(target))
    embeddings, readout = target.model.get_input_embeddings(), Readout(target, None)
    hidden = torch.zeros(target.vocabulary, dtype=torch.bool, device=target.device)
    if head.tokens is not None:
        hidden[:] = True
        hidden[head.tokens] = False
    right = seen = 0
    for continuation in continuations:
        text = think(target, (*continuation.prompt, *continuation.tokens), len(continuation.prompt), modules)
        for found in foretell(head, embeddings, Batch.of([text], head), 1):
            logits = readout(found.made.to(target.model.dtype))
            places = (found.alive[0].nonzero()[:, 0] + 2).tolist()  # row i says token i + 2
            for place, row, own in zip(places, logits, found.own.tolist(), strict=True):
                start = place - text.begin - 1
                if not 0 <= start < continuation.starts or continuation.limit(start) < 1:
                    continue
                unsaid = hidden.clone()
                unsaid[text.tokens[:place].to(target.device)] = False
                right += int(row[: target.vocabulary].masked_fill(unsaid, -float("inf")).argmax()) == own
                seen += 1
    return right / max(1, seen)
