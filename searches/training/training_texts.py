"""What does a target say by itself, and which tokens does it say most? Its own texts, written once and kept.

Whatever is trained or fitted learns from them; in one outputs folder the same settings give the same texts to all, and who
asks for more has those that are there first among them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from layerskip import PromptSet, Sampling, Target
from layerskip.drafters.token_translation import Translation
from layerskip.files import digest
from layerskip.heads.readout import choose_tokens
from layerskip.prompts import PromptItem
from layerskip.rules import check_type
from layerskip.texts import training_texts as own_texts
from layerskip.texts.continuations import Continuation, OnUse
from layerskip.texts.training_texts import TrainingText
from searches.app.checks import InputError
from searches.app.file_lock import exclusive
from searches.app.resume_log import ResultLog

_TEXTS = ("max_new_tokens", "batch", "seed")
_RECIPE = 3  # of layerskip.texts.training_texts; texts of another are written anew


def asked_texts(config: DictConfig, target: Target, sampling: Sampling, like: Sequence[str]) -> dict[str, Any]:
    """Everything that texts depend on, and how many tokens of them are asked for."""
    return kind_of_texts(config, target, sampling, like) | {"tokens": config.tokens}


def kind_of_texts(config: DictConfig, target: Target, sampling: Sampling, like: Sequence[str]) -> dict[str, Any]:
    """What texts depend on, however many are asked for: those of one kind begin alike."""
    kind = {"recipe": _RECIPE, "target": target.digest}
    kind |= {"sampling": sampling.to_dict(), "like": list(like)}
    return kind | {name: config[name] for name in _TEXTS}


def write_texts(
    config: DictConfig, target: Target, sampling: Sampling, like: Sequence[str], on_use: OnUse = lambda *_: None
) -> list[TrainingText]:
    """The first of the target's own texts that together have as many tokens as are asked for, or a few more.

    Those that are kept in the outputs folder are not written again.

    Args:
        config: says how many, of what length, and from which seed.
        target: the model.
        sampling: how answers are chosen.
        like: what every other text begins like.
        on_use: hears of them, also where writing is interrupted.
    """
    file = Path(config.outputs) / "texts" / f"{digest(kind_of_texts(config, target, sampling, like))[:16]}.jsonl"
    with exclusive(file):
        kept, texts = ResultLog(file), list[TrainingText]()
        there = len(kept)
        try:
            texts = _write(config, target, sampling, like, kept)
        finally:
            took = [sum(kept[str(number)][2:]) for number in range(len(texts) or len(kept))]  # old ones say nothing
            on_use(f"texts {file.stem}", sum(took), sum(took[there:]))
        return texts


def _write(
    config: DictConfig, target: Target, sampling: Sampling, like: Sequence[str], kept: ResultLog
) -> list[TrainingText]:
    texts = [TrainingText(tuple(kept[name][0]), kept[name][1]) for name in kept]
    said = list(accumulate(len(text.tokens) - text.begin for text in texts))
    enough = next((number for number, tokens in enumerate(said, 1) if tokens >= config.tokens), None)
    if enough is not None:
        return texts[:enough]
    left = int(config.tokens) - (said[-1] if said else 0)
    with tqdm(total=int(config.tokens), initial=int(config.tokens) - left, unit="token", desc="texts", disable=None) as bar:
        # Draws of their own for what was missing after a kill, so that no text is drawn twice.
        seed = config.seed + 1000 * len(texts)
        source = own_texts.write_texts(target, sampling, int(config.max_new_tokens), int(config.batch), seed, like)
        while left > 0:
            start, text = time.monotonic(), next(source)  # the first of a batch waits for all of it
            kept.add(str(len(texts)), [list(text.tokens), text.begin, time.monotonic() - start])
            texts.append(text)
            left -= len(text.tokens) - text.begin
            bar.update(len(text.tokens) - text.begin)
    return texts


def told_apart(texts: Sequence[TrainingText]) -> str:
    """A digest of texts: those that were written anew are others, though as many were asked for alike."""
    return digest([list(text.tokens) for text in texts])


def begun_like(field: str, path: str | None, measured: PromptSet) -> list[str]:
    """What users said in a file of prompts, for texts that begin like it.

    Args:
        field: of the configuration that names the file.
        path: of the file; None for nothing.
        measured: prompts that are searched or measured on, which drafts must not know from their training.

    Raises:
        ConfigError: the path is no text.
        InputError: a prompt of the file is among those.
        PromptError: the file holds no prompts.
    """
    if path is None:
        return []
    check_type(field, path, str)
    said = [item.messages()[-1]["content"] for item in PromptSet.load(path, field)]
    known = {" ".join(text.split()) for text in said} & {text for item in measured for text in _asked_in(item)}
    if known:
        raise InputError(f"{field}: {path} holds {len(known)} of the prompts that are measured")
    return said


def _asked_in(item: PromptItem) -> list[str]:
    """All that a user says in a conversation, however it is spaced."""
    said = [message["content"] for message in item.messages() if message["role"] == "user"]
    return [" ".join(text.split()) for text in (*said, *item.followups)]


def check_drafted(name: str, size: int | None, target: Target) -> None:
    """Refuse so few drafted tokens that those which are always among them do not fit; None is for all.

    Raises:
        InputError: they do not; the message begins with the field's name.
    """
    always = len(_always(target))
    if size is not None and size < always:
        raise InputError(f"{name}: {size} tokens are fewer than the {always} special ones, which are always among them")


def drafted_tokens(target: Target, texts: list[TrainingText], size: int | None) -> Tensor | None:
    """``[v]`` int64: the tokens that are drafted from, those that the target says most; None for all."""
    return _commonest(target, (text.tokens[text.begin :] for text in texts), size)


def respelled_tokens(draft: Target, target: Target, texts: list[TrainingText], size: int) -> Tensor | None:
    """As :func:`drafted_tokens`, the tokens of a draft model that spells otherwise what the target says."""
    assert target.tokenizer is not None
    assert draft.tokenizer is not None
    translation = Translation(target.tokenizer, draft.tokenizer)
    return _commonest(draft, (translation.to_draft(text.tokens[text.begin :]) for text in texts), size)


def _commonest(owner: Target, answers: Iterable[Sequence[int]], size: int | None) -> Tensor | None:
    if size is None or size >= owner.vocabulary:
        return None
    said = torch.tensor([token for answer in answers for token in answer if token < owner.vocabulary], dtype=torch.int64)
    counts = torch.bincount(said, minlength=owner.vocabulary)
    return choose_tokens(counts, size, _always(owner))


def _always(target: Target) -> list[int]:
    """The tokens that are drafted whatever their count."""
    special = [] if target.tokenizer is None else target.tokenizer.all_special_ids
    return sorted({token for token in (*target.eos_ids, *special) if token < target.vocabulary})


def continuations_of(texts: list[TrainingText]) -> list[Continuation]:
    """A target's own texts as continuations."""
    found = []
    for number, text in enumerate(texts):
        answer = text.tokens[text.begin :]
        if len(answer) > 1:
            found.append(Continuation(str(number), "own", text.tokens[: text.begin], answer, len(answer)))
    return found
