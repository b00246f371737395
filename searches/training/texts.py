"""Training texts, which the target generates once, and the tokens that it generates most.

In one outputs folder, equal settings give equal texts, and a request for more texts extends those that exist. Neither texts
nor datastores may hold the prompts that are measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from layerskip import PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.config import check_type
from layerskip.drafters.retrieval import Datastore
from layerskip.files import digest
from layerskip.heads.readout import choose_tokens
from layerskip.prompts import PromptItem
from layerskip.texts import training_texts
from layerskip.texts.training_texts import TrainingText
from searches.app.checks import InputError
from searches.results import ResultLog, exclusive

_VERSION = 5  # of layerskip.texts.training_texts; texts of another version are written again


def texts_settings(config: DictConfig, target: Target, sampling: Sampling, like: Sequence[str]) -> dict[str, Any]:
    """Return what texts depend on apart from their number. Every other text begins like one of the prompts ``like``."""
    settings = {"recipe": _VERSION, "target": target.digest, "sampling": sampling.to_dict(), "like": list(like)}
    return settings | {name: config[name] for name in ("max_new_tokens", "batch", "seed")}


def write_texts(
    config: DictConfig, target: Target, sampling: Sampling, like: Sequence[str]
) -> tuple[list[TrainingText], float]:
    """Write, or continue, the first training texts with as many tokens as are asked for; return them and their seconds."""
    file = Path(config.outputs) / "texts" / f"{digest(texts_settings(config, target, sampling, like))[:16]}.jsonl"
    with exclusive(file), tqdm(total=int(config.tokens), unit="token", desc="texts", disable=None) as bar:
        log, texts, left = ResultLog(file), list[TrainingText](), int(config.tokens)
        # After an interruption, another seed avoids that texts are drawn twice.
        seed = config.seed + 1000 * len(log)
        source = training_texts.write_texts(target, sampling, int(config.max_new_tokens), int(config.batch), seed, like)
        while left > 0:
            name = str(len(texts))
            if name not in log:
                start, new = time.monotonic(), next(source)  # the first text of a batch waits for the whole batch
                log.add(name, [list(new.tokens), new.begin, time.monotonic() - start])
            tokens, begin, _ = log[name]
            texts.append(TrainingText(tuple(tokens), begin))
            left -= len(tokens) - begin
            bar.update(len(tokens) - begin)
        return texts, sum(log[str(index)][2] for index in range(len(texts)))


def texts_digest(texts: Sequence[TrainingText]) -> str:
    """Return a digest of the texts themselves, which differ if they were written again with the same settings."""
    return digest([list(text.tokens) for text in texts])


def opening_texts(path: str | None, measured: PromptSet) -> list[str]:
    """Return the last user messages of the file ``begin_like``; none of them may be a ``measured`` prompt."""
    if path is None:
        return []
    check_type("begin_like", path, str)
    texts = [item.messages()[-1]["content"] for item in PromptSet.load(path, "begin_like")]
    known = {_normalised(text) for text in texts} & {text for item in measured for text in _user_texts(item)}
    if known:
        raise InputError(f"begin_like: {path} holds {len(known)} of the prompts that are measured")
    return texts


def refuse_answers(field: str, folder: str, target: Target, prompts: PromptSet) -> None:
    """Refuse a datastore, named by a field, that holds the target's own answers to measured prompts, or cannot be used."""
    measured = {digest(item.content()) for item in prompts}  # by content, because ids may repeat in other files
    known = measured.intersection(Datastore.load(folder, target).about["prompts"])
    if known:
        raise InputError(f"{field}: {folder} holds the target's own answers to {len(known)} of the measured prompts")


def refuse_answers_of(owner: str, config: SpeculativeConfig, target: Target, prompts: PromptSet) -> None:
    """Apply :func:`refuse_answers` to all datastores of a configuration, which the field ``owner`` has, and its members."""
    configs = {owner: config} | {f"{owner}.members.{index}": member for index, member in enumerate(config.members)}
    for field, part in configs.items():
        if part.datastore:
            refuse_answers(f"{field}.datastore", part.datastore, target, prompts)


def _user_texts(item: PromptItem) -> list[str]:
    texts = [message["content"] for message in item.messages() if message["role"] == "user"]
    return [_normalised(text) for text in (*texts, *item.followups)]


def _normalised(text: str) -> str:
    return " ".join(text.split())


def check_draft_vocabulary(size: int | None, target: Target) -> None:
    """Check that a draft vocabulary, unless it is the whole one, has room for the special tokens, which are always in it."""
    always = len(_special_tokens(target))
    if size is not None and size < always:
        raise InputError(f"vocabulary: {size} tokens are fewer than the {always} special ones, which are always among them")


def drafted_tokens(target: Target, texts: list[TrainingText], size: int | None) -> Tensor | None:
    """Return the draft vocabulary, ``[size]`` int64: the target's most frequent tokens; None for the whole vocabulary."""
    if size is None or size >= target.vocabulary:
        return None
    answered = (token for text in texts for token in text.tokens[text.begin :])
    tokens = torch.tensor([token for token in answered if token < target.vocabulary], dtype=torch.int64)
    return choose_tokens(torch.bincount(tokens, minlength=target.vocabulary), size, _special_tokens(target))


def _special_tokens(target: Target) -> list[int]:
    special = [] if target.tokenizer is None else target.tokenizer.all_special_ids
    return sorted({token for token in (*target.eos_ids, *special) if token < target.vocabulary})
