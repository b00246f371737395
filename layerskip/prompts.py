"""Prompt sets, and their split into a tune half and a held-out half that a search never sees.

A prompt set is read from JSON Lines, one object per line: ``{"prompt": ...}`` or ``{"messages": [...]}`` with optional
``id`` and ``category``, or ``{"question_id", "category", "turns": [...]}``. Several turns are a conversation in which the
target gives the answers. ``question`` without a ``prompt`` is one, and ``task_id`` is an id. A name that ends with ``.gz``
is unpacked. A :class:`PromptFormat` says what the files of a benchmark hold. The half of a prompt depends on the ids alone.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Message = Mapping[str, str]


class PromptError(ValueError):
    """An invalid prompt file. The message gives the file and the line."""


@dataclass(frozen=True)
class PromptItem:
    """One prompt, or a conversation."""

    id: str  # identifies the prompt in every measurement
    category: str  # such as code
    opening: str | tuple[Message, ...]  # a text, or chat messages that end with a user message
    followups: tuple[str, ...] = ()  # the user's message after each answer

    @property
    def field(self) -> str:
        """The name that errors of this prompt begin with."""
        return f"prompts: {self.id}"

    def messages(self) -> list[Message]:
        """Return the opening as chat messages."""
        if isinstance(self.opening, str):
            return [{"role": "user", "content": self.opening}]
        return [dict(message) for message in self.opening]

    def content(self) -> str:
        """Return the prompt's messages as canonical JSON."""
        return json.dumps([self.messages(), self.followups], ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class PromptSet:
    """Prompts with distinct ids, and the name of the set in reports."""

    items: tuple[PromptItem, ...]
    name: str = "prompts"

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[PromptItem]:
        return iter(self.items)

    @classmethod
    def packaged(cls) -> PromptSet:
        """Return the default set: 48 prompts in six categories, written for this project."""
        return replace(cls.load(Path(__file__).with_name("data") / "prompts.jsonl"), name="packaged")

    @classmethod
    def load(cls, path: str | Path, field: str = "prompts.path") -> PromptSet:
        """Read a JSON Lines file; ``field`` is the setting that a :class:`PromptError` names."""
        return _read(path, field, _item)

    @classmethod
    def of(cls, texts: Iterable[str]) -> PromptSet:
        """Return a set of distinct plain texts. The id of each is a digest of its content."""
        if isinstance(texts, str):
            raise PromptError("prompts: is one text, not a list of texts")
        return cls(_distinct(((f"prompts: {index}", {"prompt": text}) for index, text in enumerate(texts)), _item))

    @property
    def digest(self) -> str:
        """SHA-256 of ids, categories and contents, independent of their order."""
        rows = sorted((item.id, item.category, item.content()) for item in self.items)
        return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()

    def split(self) -> tuple[PromptSet, PromptSet]:
        """Return the tune and held-out halves: alternate prompts of each category, ordered by the hashes of their ids."""
        if len(self) < 2:
            raise PromptError("prompts: a search needs at least two, one for each half")
        ordered = list(itertools.chain(*self._by_category()))
        return PromptSet(tuple(ordered[::2]), f"{self.name}/tune"), PromptSet(tuple(ordered[1::2]), f"{self.name}/held-out")

    def take(self, count: int | None, begin: int = 0) -> PromptSet:
        """Return at most ``count`` prompts after the first ``begin``, modulo their total, with the categories in turn."""
        groups = self._by_category()
        ordered = [group[turn] for turn in range(max(map(len, groups))) for group in groups if turn < len(group)]
        begin %= len(ordered)
        return PromptSet(tuple([*ordered[begin:], *ordered[:begin]][:count]), self.name)

    def _by_category(self) -> list[list[PromptItem]]:
        ordered = sorted(self.items, key=lambda item: (item.category, _hash(item.id)))
        return [list(group) for _, group in itertools.groupby(ordered, key=lambda item: item.category)]


@dataclass(frozen=True)
class PromptFormat:
    """A benchmark whose prompt files are read as they are published."""

    name: str  # the name of the set in reports
    text: str  # the field of the prompt: a text, or the turns of a conversation
    id: str | None = None  # the field of the id; None if the id follows from the content
    category: str | None = None  # the field of the category; None if all prompts have that of the format's name
    reported_as: Mapping[str, str] = field(default_factory=dict)  # by category, the name it is reported under, if another

    def load(self, path: str | Path) -> PromptSet:
        """Read a file of the benchmark, every line of which has all fields of the format."""
        return replace(_read(path, "prompts.path", self._item), name=self.name)

    def _item(self, fields: Any) -> PromptItem:
        names = [name for name in (self.id, self.category, self.text) if name is not None]
        if not isinstance(fields, dict):
            raise PromptError(f"not an object with the fields of {self.name}: {', '.join(names)}")
        for name in names:
            if fields.get(name) is None:
                raise PromptError(f"{name}: is missing; lines of {self.name} have {', '.join(names)}")
        item = _item({"category": self.name} | {name: fields[name] for name in names})
        return replace(item, category=self.reported_as.get(item.category, item.category))


_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
# github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl; evaluation/speed.py reports MT-Bench's categories as one.
SPEC_BENCH = PromptFormat("spec_bench", "turns", "question_id", "category", dict.fromkeys(_MT_BENCH, "mt_bench"))
# github.com/lm-sys/FastChat, fastchat/llm_judge/data/mt_bench/question.jsonl
MT_BENCH = PromptFormat("mt_bench", "turns", "question_id", "category")
HUMANEVAL = PromptFormat("humaneval", "prompt", "task_id")  # github.com/openai/human-eval, data/HumanEval.jsonl.gz
GSM8K = PromptFormat("gsm8k", "question")  # github.com/openai/grade-school-math, grade_school_math/data/test.jsonl


def _read(path: str | Path, field: str, read: Callable[[Any], PromptItem]) -> PromptSet:
    """Return the prompts that a function reads from the lines of a file; errors name the setting ``field``."""
    path = str(path)  # Hydra parses a name of digits as a number
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise PromptError(f"{field}: cannot read {path}: {error}") from None
    items = _distinct(_lines(text, f"{field}: {path}"), read)
    if not items:
        raise PromptError(f"{field}: {path}: has no prompts")
    return PromptSet(items, Path(path.removesuffix(".gz")).stem)


def _lines(text: str, source: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of every line of JSON Lines that is not blank."""
    # Not splitlines, because JSON strings may contain other line separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{source}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PromptError(f"{place}: not JSON: {error}") from None
            yield place, value


def _distinct(objects: Iterable[tuple[str, Any]], read: Callable[[Any], PromptItem]) -> tuple[PromptItem, ...]:
    """Return the prompts of objects, each with its place; errors name the place, and the object's id if it has one."""
    found: dict[str, tuple[PromptItem, str]] = {}
    for place, fields in objects:
        try:
            item = read(fields)
        except PromptError as error:
            name, chosen = _id(fields) if isinstance(fields, dict) else ("id", None)
            named = "" if chosen is None or str(error).startswith(f"{name}: ") else f"{name} {reprlib.repr(chosen)}: "
            raise PromptError(f"{place}: {named}{error}") from None
        if item.id in found:
            raise PromptError(f"{place}: the id {item.id!r} is already used in {found[item.id][1]}")
        found[item.id] = item, place
    return tuple(item for item, _ in found.values())


def _id(fields: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of the field that is the id."""
    return next(((name, fields[name]) for name in ("id", "question_id", "task_id") if name in fields), ("id", None))


def _item(fields: Any) -> PromptItem:
    if not isinstance(fields, dict):
        raise PromptError("not an object with 'prompt', 'messages' or 'turns'")
    given = [name for name in ("prompt", "messages", "turns") if name in fields] or ["question"] * ("question" in fields)
    if len(given) != 1:
        raise PromptError(f"needs exactly one of 'prompt', 'messages' and 'turns'; it has {given or 'none'}")
    form = given[0]
    opening: str | tuple[Message, ...]
    followups: list[str] = []
    if form == "messages":
        opening = _messages(fields[form])
    else:
        turns = fields[form] if form == "turns" else [fields[form]]
        if not isinstance(turns, list) or not turns:
            raise PromptError("turns: is not a list of texts")
        opening, *followups = [_text(turn, form) for turn in turns]
    category = _label(fields.get("category", "default"), "category")
    item, (name, chosen) = PromptItem("", category, opening, tuple(followups)), _id(fields)
    return replace(item, id=_hash(item.content())[:12] if chosen is None else _label(chosen, name))


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise PromptError("messages: is not a list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError("messages: every message needs 'role' and 'content'")
        _text(message.get("content"), "messages")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise PromptError(f"{name}: {value!r} is not a non-empty text")
    return _unicode(value, name)


def _label(value: Any, name: str) -> str:
    """Return an id or a category as text; a missing category may be null."""
    if isinstance(value, (bool, list, dict)):
        raise PromptError(f"{name}: {value!r} is neither a text nor a number")
    return _unicode(str(value), name)


def _unicode(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, as in truncated files
        raise PromptError(f"{name}: is not valid Unicode: {error}") from None
    return text


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
