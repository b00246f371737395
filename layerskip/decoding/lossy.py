"""Lossy acceptance rules, which are faster and change the output.

They exist for comparison with published systems: a threshold on the target's probability, and typical acceptance, Medusa
(arXiv 2401.10774), section 2.3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip.decoding.draft import DeviceTree, Draft
from layerskip.decoding.sampling import draw
from layerskip.decoding.verify import Verdict
from layerskip.device.transfer import read_to_host
from layerskip.rules import AcceptRule


def accept_lossy(
    draft: Draft,
    target_probs: Tensor,
    logits: Tensor,
    rule: AcceptRule,
    generator: torch.Generator | None = None,
    late: Sequence[Tensor] = (),
) -> Verdict:
    """Accept tokens that the target finds likely enough, along the deepest such branch, and add one token of the target.

    Of several branches of that depth the likeliest is accepted.

    Args:
        draft: K tokens, a chain or a tree.
        target_probs: as for :func:`~layerskip.decoding.verify.verify`.
        logits: ``[K + 1, V]``: the target's, before any warping.
        rule: any rule but ``exact``.
        generator: the source of randomness.
        late: tensors to read, too.
    """
    probs = logits.float().softmax(-1)
    limits = torch.full_like(probs[:, 0], rule.threshold)
    if rule.kind == "typical":
        entropy = torch.special.entr(probs).sum(-1)
        limits = (rule.delta * (-entropy).exp()).clamp_max(rule.epsilon)
    draft = draft.read_shape()
    assert not isinstance(draft.parents, DeviceTree)
    tokens, *values = read_to_host(draft.tokens, *late)
    parents = range(-1, len(tokens) - 1) if draft.parents is None else draft.parents
    node_probs = [float(probs[parent + 1, token]) for token, parent in zip(tokens, parents, strict=True)]
    passes = [prob >= float(limits[parent + 1]) for prob, parent in zip(node_probs, parents, strict=True)]
    branches: dict[int, tuple[float, tuple[int, ...]]] = {-1: (1.0, ())}  # accepted branches by their last node
    for node, parent in enumerate(parents):
        if passes[node] and parent in branches:
            prob, path_above = branches[parent]
            branches[node] = prob * node_probs[node], (*path_above, node)
    _, path = max(branches.values(), key=lambda branch: (len(branch[1]), branch[0]))
    row = target_probs[(path[-1] if path else -1) + 1]
    last = row[None] if target_probs.dtype == torch.int64 else draw(row[None], generator)
    return Verdict(tuple(tokens), len(path), int(last), last, None if draft.parents is None else path, draft.parents, values)
