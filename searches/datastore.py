"""Datastores of earlier texts for ``method: retrieval``: building and inspection.

Usage: ``python -m searches.datastore corpus=notes output=store``

It reads every text in a folder, or one file. ``own=true`` adds the target's own continuations of prompts, which are stored
and generated once. A datastore must not be measured on those prompts, because its drafts would be the answers.
``inspect=store`` describes a datastore.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from layerskip import PromptSet, Target
from layerskip.drafters.retrieval import Datastore
from layerskip.files import digest
from layerskip.texts.continuations import continue_prompts
from searches.app.application import run
from searches.app.checks import InputError, check_flag, check_folder, check_seed, check_whole

_SUFFIXES = (".txt", ".md", ".jsonl")


def datastore(config: DictConfig) -> Datastore:
    """Build or inspect a datastore; see ``conf/datastore.yaml``."""
    check_whole("max_new_tokens", config.max_new_tokens)
    check_seed(config.seed)
    check_flag("own", config.own)
    target: Target = instantiate(config.target)
    store = Datastore.load(config.inspect, target) if config.inspect is not None else _build(config, target)
    size, about = (store.tokens.nbytes + store.suffixes.nbytes) / 2**20, store.about
    print(f"{about['tokens']:,} tokens of {about['texts']:,} texts from {about['source']}, {size:,.1f} MiB")
    return store


def _build(config: DictConfig, target: Target) -> Datastore:
    if config.output is None:
        raise InputError("output: names no folder for the datastore")
    if Path(config.output).exists():
        raise InputError(f"output: {config.output} exists already")
    check_folder("output", config.output)
    if config.corpus is None and not config.own:
        raise InputError("corpus: names neither a file nor a folder, and own is false; there is nothing to build from")
    if target.tokenizer is None:
        raise InputError("target: has no tokenizer to read a corpus with")
    texts, sources, answered = [], [], []
    if config.corpus is not None:
        sources.append(config.corpus)
        for file in tqdm(_corpus_files(Path(config.corpus)), unit="file", desc="corpus", disable=None):
            texts += [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in _read_texts(file)]
    if config.own:
        sources.append("the target's own outputs")
        prompts: PromptSet = instantiate(config.prompts)
        answered = [digest(item.content()) for item in prompts]
        folder = Path(config.outputs) / "continuations"
        with tqdm(total=len(prompts), unit="prompt", desc="own outputs", disable=None) as bar:
            continuations = continue_prompts(
                target, prompts, instantiate(config.sampling), config.max_new_tokens, config.seed, folder, bar.update
            )
        texts += [continuation.tokens for continuation in continuations]
    store = Datastore.build(texts, target, " and ".join(sources), answered)
    store.save(Path(config.output))
    print(f"wrote {config.output}")
    return store


def _corpus_files(path: Path) -> list[Path]:
    """Return the files of a corpus, at least one."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise InputError(f"corpus: there is no {path}")
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    if not files:
        raise InputError(f"corpus: {path} has no {', '.join(_SUFFIXES)} files")
    return files


def _read_texts(file: Path) -> Iterator[str]:
    """Yield the texts of a file: the ``text`` of each line of JSON Lines, or else the whole file."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"corpus: cannot read {file}: {error}") from None
    if file.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
                text.encode()  # refuses a lone surrogate, as in truncated files
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"corpus: {file}, line {number}: is not a JSON object with a text: {error}") from None
            yield text


if __name__ == "__main__":
    run("datastore", datastore, is_printed=True)
