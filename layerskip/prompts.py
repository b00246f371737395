"""Prompt sets, and their split into a tune half and a held-out half that a search never sees.

A prompt set is read from JSON Lines, one object per line: ``{"prompt": ...}`` or ``{"messages": [...]}`` with optional
``id`` and ``category``, or ``{"question_id", "category", "turns": [...]}``. Several turns are a conversation in which the
target gives the answers. ``question`` without a ``prompt`` is one, and ``task_id`` is an id. So the files of Spec-Bench,
MT-Bench, HumanEval and GSM8K are read as they are. The half of a prompt depends on the ids alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
        path = str(path)  # Hydra parses a name of digits as a number
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"{field}: cannot read {path}: {error}") from None
        items = _distinct(_lines(text, f"{field}: {path}"))
        if not items:
            raise PromptError(f"{field}: {path}: has no prompts")
        return cls(items, Path(path).stem)

    @classmethod
    def of(cls, texts: Iterable[str]) -> PromptSet:
        """Return a set of distinct plain texts. The id of each is a digest of its content."""
        if isinstance(texts, str):
            raise PromptError("prompts: is one text, not a list of texts")
        return cls(_distinct((f"prompts: {index}", {"prompt": text}) for index, text in enumerate(texts)))

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


def _distinct(objects: Iterable[tuple[str, Any]]) -> tuple[PromptItem, ...]:
    """Return the prompts of objects, each with its place; errors name the place, and the object's id if it has one."""
    found: dict[str, tuple[PromptItem, str]] = {}
    for place, fields in objects:
        try:
            item = _item(fields)
        except PromptError as error:
            chosen = _id(fields) if isinstance(fields, dict) else None
            named = "" if chosen is None or str(error).startswith("id: ") else f"id {reprlib.repr(chosen)}: "
            raise PromptError(f"{place}: {named}{error}") from None
        if item.id in found:
            raise PromptError(f"{place}: the id {item.id!r} is already used in {found[item.id][1]}")
        found[item.id] = item, place
    return tuple(item for item, _ in found.values())


def _id(fields: Mapping[str, Any]) -> Any:
    return next((fields[name] for name in ("id", "question_id", "task_id") if name in fields), None)


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
    item, chosen = PromptItem("", category, opening, tuple(followups)), _id(fields)
    return replace(item, id=_hash(item.content())[:12] if chosen is None else _label(chosen, "id"))


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
