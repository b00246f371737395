"""Prompt sets, and their split into a tune half and a held-out half that a search never sees.

A prompt set is read from JSON Lines, one object per line: ``{"prompt": ...}`` or ``{"messages": [...]}`` with optional
``id`` and ``category``, or ``{"question_id", "category", "turns": [...]}``. Several turns are a conversation in which the
target gives the answers. ``question`` without a ``prompt`` is one, and ``task_id`` is an id. So the files of Spec-Bench,
MT-Bench, HumanEval and GSM8K are read as they are. The half of a prompt depends on the ids alone, not on the order of the
lines.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

Message = Mapping[str, str]


class PromptError(ValueError):
    """An invalid prompt file. The message gives the file and the line."""


@dataclass(frozen=True)
class PromptItem:
    """One prompt, or a conversation.

    Args:
        id: identifies the prompt in every measurement.
        category: such as code.
        opening: a text, or chat messages that end with a user message.
        followups: the user's message after each answer.
    """

    id: str
    category: str
    opening: str | tuple[Message, ...]
    followups: tuple[str, ...] = ()

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
        text = resources.files("layerskip").joinpath("data/prompts.jsonl").read_text(encoding="utf-8")
        return cls(_read(text, "packaged prompts"), "packaged")

    @classmethod
    def load(cls, path: str | Path, field: str = "prompts.path") -> PromptSet:
        """Read a JSON Lines file; ``field`` is the setting that a :class:`PromptError` names."""
        path = str(path)  # Hydra parses a name of digits as a number
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"{field}: cannot read {path}: {error}") from None
        return cls(_read(text, f"{field}: {path}"), Path(path).stem)

    @classmethod
    def of(cls, texts: Iterable[str]) -> PromptSet:
        """Return a set of distinct plain texts. The id of each is a digest of its content."""
        if isinstance(texts, str):
            raise PromptError("prompts: is one text, not a list of texts")
        return cls(_distinct([(_placed({"prompt": text}, f"prompts: {i}"), f"prompt {i}") for i, text in enumerate(texts)]))

    @property
    def digest(self) -> str:
        """SHA-256 of ids, categories and contents, independent of their order."""
        rows = sorted((item.id, item.category, item.content()) for item in self.items)
        return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()

    def split(self) -> tuple[PromptSet, PromptSet]:
        """Return the tune and held-out halves: alternate prompts of each category, ordered by the hashes of their ids."""
        if len(self) < 2:
            raise PromptError("prompts: a search needs at least two, one for each half")
        ordered = [item for group in self._by_category().values() for item in group]
        return PromptSet(tuple(ordered[::2]), f"{self.name}/tune"), PromptSet(tuple(ordered[1::2]), f"{self.name}/held-out")

    def take(self, count: int | None, begin: int = 0) -> PromptSet:
        """Return at most ``count`` prompts after the first ``begin``, modulo their total, with the categories in turn."""
        groups = list(self._by_category().values())
        ordered = [group[turn] for turn in range(max(map(len, groups))) for group in groups if turn < len(group)]
        begin %= len(ordered)
        return PromptSet(tuple([*ordered[begin:], *ordered[:begin]][:count]), self.name)

    def _by_category(self) -> dict[str, list[PromptItem]]:
        groups: dict[str, list[PromptItem]] = {}
        for item in sorted(self.items, key=lambda item: (item.category, _hash(item.id))):
            groups.setdefault(item.category, []).append(item)
        return groups


def _read(text: str, source: str) -> tuple[PromptItem, ...]:
    items = []
    # Not splitlines, because JSON strings may contain other line separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{place}: not JSON: {error}") from None
        items.append((_placed(fields, place), place))
    if not items:
        raise PromptError(f"{source}: has no prompts")
    return _distinct(items)


def _distinct(items: list[tuple[PromptItem, str]]) -> tuple[PromptItem, ...]:
    places: dict[str, str] = {}
    for item, place in items:
        if item.id in places:
            raise PromptError(f"{place}: the id {item.id!r} is already used in {places[item.id]}")
        places[item.id] = place
    return tuple(item for item, _ in items)


def _placed(fields: Any, place: str) -> PromptItem:
    """Return the prompt of an object; errors name its place, and its id if it has one."""
    try:
        return _item(fields)
    except PromptError as error:
        chosen = _id(fields) if isinstance(fields, dict) else None
        named = "" if chosen is None or str(error).startswith("id: ") else f"id {reprlib.repr(chosen)}: "
        raise PromptError(f"{place}: {named}{error}") from None


def _id(fields: Mapping[str, Any]) -> Any:
    return next((fields[name] for name in ("id", "question_id", "task_id") if name in fields), None)


def _item(fields: Any) -> PromptItem:
    if not isinstance(fields, dict):
        raise PromptError("not an object with 'prompt', 'messages' or 'turns'")
    given = [name for name in ("prompt", "messages", "turns") if name in fields] or ["question"] * ("question" in fields)
    if len(given) != 1:
        raise PromptError(f"needs exactly one of 'prompt', 'messages' and 'turns'; it has {given or 'none'}")
    opening: str | tuple[Message, ...]
    followups: tuple[str, ...] = ()
    if given[0] in ("prompt", "question"):
        opening = _text(fields[given[0]], given[0])
    elif given == ["messages"]:
        opening = _messages(fields["messages"])
    else:
        turns = fields["turns"]
        if not isinstance(turns, list) or not turns:
            raise PromptError("turns: is not a list of texts")
        opening, *rest = [_text(turn, "turns") for turn in turns]
        followups = tuple(rest)
    category = _label(fields.get("category", "default"), "category")
    item, chosen = PromptItem("", category, opening, followups), _id(fields)
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
