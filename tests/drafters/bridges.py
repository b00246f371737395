"""Bridges and draft heads of tiny targets, fitted to the targets' own texts."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path

import torch

from layerskip.bridges.bridge import BridgeShape, save_bridges
from layerskip.bridges.fit import Calibration
from layerskip.decoding.sampling import Sampling
from layerskip.mask import SkipMask
from layerskip.models.draft_head import save_draft_tokens
from layerskip.models.target import Target
from layerskip.texts.continuations import Continuation
from layerskip.texts.training_texts import write_texts
from tests.drafters.heads import tiny

_folder = tempfile.TemporaryDirectory()  # gone with the process


def drawn_continuations(target: Target, count: int = 6, length: int = 20, prompt: int = 4) -> list[Continuation]:
    """Returns continuations of random tokens; the first ``prompt`` tokens of each are its prompt."""
    torch.manual_seed(3)
    tokens = torch.randint(3, target.vocabulary, (count, length)).tolist()
    return [Continuation(str(i), "own", tuple(t[:prompt]), tuple(t[prompt:]), length - prompt) for i, t in enumerate(tokens)]


def bridge_shape(target: Target, mask: str, method: str = "linear", rank: int = 0, width: int = 0) -> BridgeShape:
    return BridgeShape.of(target, SkipMask.parse(mask, target.layers), method, rank, width)


@functools.cache
def calibration(family: str) -> Calibration:
    """Returns a calibration on texts of a tiny target."""
    texts = itertools.islice(write_texts(tiny(family), Sampling(1.0), 24, 16, 0), 48)
    continuations = [
        Continuation(str(i), "own", t.tokens[: t.begin], t.tokens[t.begin :], len(t.tokens) - t.begin)
        for i, t in enumerate(texts)
    ]
    return Calibration(tiny(family), continuations, 2**24)


@functools.cache
def bridge_folder(family: str, mask: str, method: str, rank: int = 0, width: int = 0) -> str:
    """Returns the folder of saved bridges. Their MLPs are drawn at random, as fitting may leave them empty."""
    target = tiny(family)
    bridges = calibration(family).fit(bridge_shape(target, mask, method, rank, width)).bridges
    with torch.no_grad():
        for _, bridge in bridges.items():
            if bridge.shape.width:
                bridge.out.normal_(0, 0.02)
    folder = Path(_folder.name) / f"{family}-{mask}-{method}-{rank}-{width}"
    save_bridges(folder, bridges, target, {})
    return str(folder)


@functools.cache
def head_folder(family: str, tokens: tuple[int, ...]) -> str:
    """Returns the folder of a saved draft head."""
    folder = Path(_folder.name) / f"{family}-head-{len(tokens)}"
    save_draft_tokens(folder, torch.tensor(tokens), tiny(family), {})
    return str(folder)
