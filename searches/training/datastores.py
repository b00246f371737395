"""What may be drafted from what was written before? Builds and inspects datastores for ``kind: retrieval``.

``python -m searches.datastore corpus=notes output=store`` reads every text below a folder, or one file; ``own=true`` adds
what the target itself says to prompts (kept, and made once), which nobody must measure: drafts would be those very answers.
``inspect=store`` describes a datastore, and ``ngram="..."`` says what followed a phrase in it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from layerskip import PromptSet, SpeculativeConfig, Target
from layerskip.drafters.datastore import Datastore
from layerskip.files import digest
from layerskip.texts.continuations import continue_prompts
from searches.app.checks import InputError, check_flag, check_folder, check_seed, check_whole

_TEXTS = (".txt", ".md", ".jsonl")
_SHOWN = 5  # continuations of a phrase
_LENGTH = 8  # tokens of each


def datastore(config: DictConfig) -> Datastore:
    """Build or inspect a datastore; see ``conf/datastore.yaml``."""
    check_whole("max_new_tokens", config.max_new_tokens)
    check_seed(config.seed)
    check_flag("own", config.own)
    for name in ("corpus", "output", "inspect"):
        if config[name] is not None and not isinstance(config[name], str):
            raise InputError(f"{name}: {config[name]!r} is not a path")
    target: Target = instantiate(config.target)
    found = Datastore.load(config.inspect, target) if config.inspect is not None else _build(config, target)
    print(describe(found))
    if config.ngram is not None:
        print(followers(found, str(config.ngram), target))
    return found


def _build(config: DictConfig, target: Target) -> Datastore:
    if config.output is None:
        raise InputError("output: names no folder for the datastore")
    if Path(config.output).exists():
        raise InputError(f"output: {config.output} exists already")
    check_folder("output", os.path.dirname(os.path.abspath(config.output)))
    if config.corpus is None and not config.own:
        raise InputError("corpus: names neither a file nor a folder, and own is false; there is nothing to build from")
    if target.tokenizer is None:
        raise InputError("target: has no tokenizer to read a corpus with")
    texts, sources, answered = [], [], []
    if config.corpus is not None:
        sources.append(str(config.corpus))
        files = corpus_files(Path(config.corpus))
        for file in tqdm(files, unit="file", desc="corpus", disable=None):
            texts += [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in read(file)]
    if config.own:
        sources.append("the target's own outputs")
        prompts: PromptSet = instantiate(config.prompts)
        answered = [digest(item.content()) for item in prompts]
        kept = Path(config.outputs) / "continuations"
        with tqdm(total=len(prompts), unit="prompt", desc="own outputs", disable=None) as bar:
            continuations = continue_prompts(
                target, prompts, instantiate(config.sampling), config.max_new_tokens, config.seed, kept, bar.update
            )
        texts += [continuation.tokens for continuation in continuations]
    found = Datastore.build(texts, target, " and ".join(sources), answered)
    found.save(Path(config.output))
    print(f"wrote {config.output}")
    return found


def corpus_files(path: Path) -> list[Path]:
    """The texts of a corpus.

    Raises:
        InputError: there are none.
    """
    if path.is_file():
        return [path]
    if not path.exists():
        raise InputError(f"corpus: there is no {path}")
    files = sorted(file for file in path.rglob("*") if file.suffix in _TEXTS and file.is_file())
    if not files:
        raise InputError(f"corpus: {path} has no {', '.join(_TEXTS)} files")
    return files


def read(file: Path) -> Iterator[str]:
    """The texts of a file: one per line's ``text`` in JSON Lines, else the whole of it.

    Raises:
        InputError: it cannot be read, or a line has no text.
    """
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
            except (ValueError, KeyError, TypeError):
                raise InputError(f"corpus: {file}, line {number}: is not a JSON object with a text") from None
            if not isinstance(text, str):
                raise InputError(f"corpus: {file}, line {number}: text is not a string")
            try:
                text.encode()
            except UnicodeEncodeError as error:  # half of a character, as truncated files have
                raise InputError(f"corpus: {file}, line {number}: text is no Unicode: {error}") from None
            yield text


def refuse_answers(field: str, folder: str, target: Target, prompts: PromptSet) -> None:
    """Refuse a datastore that would be measured on its own texts.

    Args:
        field: of the configuration that names it.
        folder: where it lies.
        target: who drafts from it.
        prompts: those that are measured.

    Raises:
        InputError: it holds the target's answers to some of the prompts.
        ConfigError: it cannot be used.
    """
    # By what they say, as prompts of another file may be called the same; earlier stores know what they are called alone.
    asked = {name for item in prompts for name in (digest(item.content()), item.id)}
    known = asked.intersection(Datastore.load(folder, target).about["prompts"])
    if known:
        raise InputError(f"{field}: {folder} holds the target's own answers to {len(known)} of the measured prompts")


def refuse_answers_of(owner: str, config: SpeculativeConfig, target: Target, prompts: PromptSet) -> None:
    """The same for all datastores that a configuration and its members draft from.

    Args:
        owner: the field of the configuration.
        config, target, prompts: as :func:`refuse_answers` takes them.
    """
    named = {owner: config} | {f"{owner}.members.{place}": member for place, member in enumerate(config.members)}
    for field, found in named.items():
        if found.datastore:
            refuse_answers(f"{field}.datastore", found.datastore, target, prompts)


def describe(found: Datastore) -> str:
    """A datastore in a line."""
    size = (found.tokens.nbytes + found.suffixes.nbytes) / 2**20
    about = found.about
    return f"{about['tokens']:,} tokens of {about['texts']:,} texts from {about['source']}, {size:,.1f} MiB"


def followers(found: Datastore, phrase: str, target: Target) -> str:
    """What followed a phrase most often, as a Markdown table."""
    if target.tokenizer is None:
        raise InputError("ngram: the target has no tokenizer to read it with")
    # Behind a space a word is another token than at the beginning of a text.
    readings = {tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (phrase, f" {phrase}")}
    if () in readings:
        raise InputError("ngram: has no tokens")
    # Where the space is a token of its own, one reading ends with the other and would count the same places again.
    readings -= {one for one in readings for other in readings if one != other and one[-len(other) :] == other}
    times = sum(len(found.places(ngram)) for ngram in readings)
    counts = Counter(tuple(part) for ngram in readings for part in found.continuations(ngram, _LENGTH, 10_000))
    lines = [f"{phrase!r} occurs {times} times", "", "| followed by | times |", "|---|---|"]
    lines += [f"| {target.tokenizer.decode(list(part))!r} | {count} |" for part, count in counts.most_common(_SHOWN)]
    return "\n".join(lines if times else lines[:1])
