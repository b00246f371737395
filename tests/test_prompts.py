"""Prompt sets: the packaged set, file formats, halves that depend on ids alone, and refusals."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from layerskip import PromptError, PromptSet
from layerskip.prompts import GSM8K, HUMANEVAL, MT_BENCH, SPEC_BENCH, PromptFormat


def _write(path: Path, lines: Sequence[Any]) -> Path:
    """Write one JSON value per line; strings are written as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def _ids(prompts: PromptSet) -> list[str]:
    return [item.id for item in prompts]


def _many(count: int, categories: int = 3) -> list[dict[str, str]]:
    return [{"id": f"q{i}", "category": f"c{i % categories}", "prompt": f"Prompt {i}"} for i in range(count)]


TURNS = [
    {"question_id": 81, "category": "writing", "turns": ["Greet a neighbour.", "Now in rhyme."]},
    {"question_id": 121, "category": "coding", "turns": ["Sort a list.", "Without sort."], "reference": ["a", "b"]},
]
FUNCTION = "def double(x):\n"
TESTED = {"canonical_solution": "    return 2 * x\n", "test": "assert double(1) == 2", "entry_point": "double"}
PUBLISHED = [  # a format, lines of the form of its files, and the id, category and turns of each
    (
        SPEC_BENCH,
        [
            *TURNS,
            {"question_id": 161, "category": "translation", "turns": ["Translate: Guten Tag."], "reference": "Good day."},
        ],
        [
            ("81", "mt_bench", "Greet a neighbour.", "Now in rhyme."),
            ("121", "mt_bench", "Sort a list.", "Without sort."),
            ("161", "translation", "Translate: Guten Tag."),
        ],
    ),
    (
        MT_BENCH,
        TURNS,
        [
            ("81", "writing", "Greet a neighbour.", "Now in rhyme."),
            ("121", "coding", "Sort a list.", "Without sort."),
        ],
    ),
    (HUMANEVAL, [{"task_id": "HumanEval/7", "prompt": FUNCTION} | TESTED], [("HumanEval/7", "humaneval", FUNCTION)]),
    # Without an id, the first twelve digits of `echo -n '[[{"content": "One and one?", "role": "user"}], []]' | sha256sum`.
    (GSM8K, [{"question": "One and one?", "answer": "#### 2"}], [("2b6decb7ab22", "gsm8k", "One and one?")]),
]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("published", "lines", "expected"), PUBLISHED, ids=[published.name for published, *_ in PUBLISHED])
def test_benchmarks_are_read_as_they_are_published(
    tmp_path: Path, published: PromptFormat, lines: Sequence[Any], expected: Sequence[Any], suffix: str
) -> None:
    file = _write(tmp_path / "published.jsonl", lines)
    if suffix:
        file = tmp_path / f"published.jsonl{suffix}"
        file.write_bytes(gzip.compress((tmp_path / "published.jsonl").read_bytes()))
    prompts = published.load(file)
    assert prompts.name == published.name
    assert [(item.id, item.category, item.opening, *item.followups) for item in prompts] == expected


@pytest.mark.parametrize(
    ("published", "changes", "reason"),
    [
        *((SPEC_BENCH, {name: None}, f"{name}: is missing") for name in ("question_id", "category", "turns")),
        *((MT_BENCH, {name: None}, f"{name}: is missing") for name in ("question_id", "category", "turns")),
        *((HUMANEVAL, {name: None}, f"{name}: is missing") for name in ("task_id", "prompt")),
        (GSM8K, {"question": None}, "question: is missing"),
        (SPEC_BENCH, {"turns": ["One.", 2]}, "question_id 'second': turns: 2 is not"),
        (MT_BENCH, {"question_id": [1]}, r"question_id: \[1\] is neither"),
        (MT_BENCH, {"question_id": "first"}, "the id 'first' is already used"),
        (HUMANEVAL, {"prompt": " "}, "_id 'second': prompt: ' ' is not"),
        (GSM8K, {"question": 5}, "question: 5 is not"),
    ],
)
def test_a_line_without_a_field_of_its_format_is_refused_by_name(
    tmp_path: Path, published: PromptFormat, changes: dict[str, Any], reason: str
) -> None:
    values = {"question_id": "first", "task_id": "first", "category": "stem", "turns": ["Why?"]}
    first = values | {"prompt": "def f():", "question": "How many?"}
    second = first | {"question_id": "second", "task_id": "second", "question": "How few?"} | changes
    for bad in (second, {name: value for name, value in second.items() if value is not None}):
        with pytest.raises(PromptError, match=f"^prompts.path: .*bad.jsonl, line 2: .*{reason}"):
            published.load(_write(tmp_path / "bad.jsonl", [first, bad]))
    with pytest.raises(PromptError, match=f"line 1: not an object with the fields of {published.name}"):
        published.load(_write(tmp_path / "bad.jsonl", ["[]"]))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"{}", id="not packed"),
        pytest.param(gzip.compress(b'{"prompt": "x"}')[:-9], id="cut off"),
        pytest.param(gzip.compress(b"\xff"), id="not UTF-8"),
    ],
)
def test_a_damaged_packed_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "some.jsonl.gz").write_bytes(content)
    with pytest.raises(PromptError, match="^prompts.path: cannot read .*some.jsonl.gz: "):
        PromptSet.load(tmp_path / "some.jsonl.gz")


def test_own_prompts_may_have_the_fields_of_benchmarks(tmp_path: Path) -> None:
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter."], "reference": []},
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": "assert f"},
        {"question": "How many?", "answer": "#### 4"},
    ]
    spec, code, sum_ = PromptSet.load(_write(tmp_path / "question.jsonl", lines))
    assert (spec.id, spec.category, spec.opening, spec.followups) == ("81", "writing", "Write.", ("Shorter.",))
    assert (code.id, code.opening) == ("HumanEval/0", "def f():\n")
    assert sum_.opening == "How many?"


def test_the_packaged_set_covers_six_kinds_of_work_in_balanced_and_disjoint_halves() -> None:
    packaged = PromptSet.packaged()
    tune, held_out = packaged.split()
    counts = [Counter(item.category for item in half) for half in (tune, held_out)]
    assert (len(packaged), len(tune), len(held_out), len(counts[0])) == (48, 24, 24, 6)
    assert counts[0] == counts[1]
    assert sorted(_ids(tune) + _ids(held_out)) == sorted(_ids(packaged))
    assert (tune.name, held_out.name) == ("packaged/tune", "packaged/held-out")
    for item in packaged:
        assert item.messages()[-1]["role"] == "user"
        assert all(message["content"].strip() for message in item.messages())


def test_every_form_of_prompt_is_read(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "On snow"}]
    file = _write(
        tmp_path / "mine.jsonl",
        [
            {"prompt": "Grüße\nan alle"},
            "",
            {"id": 7, "category": "verse", "messages": messages},
            "   ",
            {"question_id": "q", "turns": ["One turn."]},
        ],
    )
    plain, verse, single = PromptSet.load(file)
    assert plain.messages() == [{"role": "user", "content": "Grüße\nan alle"}]
    assert (plain.category, plain.followups) == ("default", ())
    assert (verse.id, verse.category, verse.messages()) == ("7", "verse", messages)
    assert (single.id, single.messages(), single.followups) == ("q", [{"role": "user", "content": "One turn."}], ())
    assert PromptSet.load(file).name == "mine"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_only_line_feeds_end_a_line_also_after_a_carriage_return(tmp_path: Path, separator: str) -> None:
    """JSON allows these unescaped in strings, and other programs write them."""
    texts = [f"one{separator}two", "three"]
    lines = (json.dumps({"prompt": text}, ensure_ascii=False).encode() for text in texts)
    (tmp_path / "p.jsonl").write_bytes(b"".join(line + b"\r\n" for line in lines))
    assert [item.opening for item in PromptSet.load(tmp_path / "p.jsonl")] == texts


def test_without_an_id_the_id_follows_from_the_content(tmp_path: Path) -> None:
    lines = [{"prompt": f"Prompt {i}"} for i in range(5)]
    one = PromptSet.load(_write(tmp_path / "one.jsonl", lines))
    other = PromptSet.load(_write(tmp_path / "other.jsonl", [*lines[::-1], {"prompt": "Another"}]))
    assert len(set(_ids(one))) == 5
    assert set(_ids(one)) < set(_ids(other))
    assert _ids(PromptSet.of(["Prompt 0", "Prompt 1"])) == _ids(one)[:2]


def test_halves_depend_on_ids_and_not_on_the_order_of_lines(tmp_path: Path) -> None:
    lines = _many(21)
    reworded = [line | {"prompt": "Other words " + line["prompt"]} for line in lines]
    variants = (lines, random.Random(1).sample(lines, len(lines)), reworded)
    halves = [[*map(_ids, PromptSet.load(_write(tmp_path / "a.jsonl", variant)).split())] for variant in variants]
    assert halves[0] == halves[1] == halves[2]


@pytest.mark.parametrize(("count", "categories"), [(2, 1), (2, 2), (7, 2), (21, 4)])
def test_halves_differ_by_one_at_max_in_all_and_in_each_category(tmp_path: Path, count: int, categories: int) -> None:
    tune, held_out = PromptSet.load(_write(tmp_path / "p.jsonl", _many(count, categories))).split()
    assert 0 <= len(tune) - len(held_out) <= 1
    counts = [Counter(item.category for item in half) for half in (tune, held_out)]
    assert all(abs(counts[0][name] - counts[1][name]) <= 1 for name in counts[0] | counts[1])
    assert len({*_ids(tune), *_ids(held_out)}) == len(tune) + len(held_out) == count


def test_the_digest_depends_on_content_and_not_on_order(tmp_path: Path) -> None:
    lines = _many(6)
    digest = PromptSet.load(_write(tmp_path / "a.jsonl", lines)).digest
    assert PromptSet.load(_write(tmp_path / "b.jsonl", lines[::-1])).digest == digest
    changed = [[lines[0] | change, *lines[1:]] for change in ({"prompt": "Prompt 0."}, {"id": "q0 "}, {"category": "c9"})]
    turns = {"id": "q0", "category": "c0", "turns": ["Prompt 0", "More."]}
    changed += [lines[1:], [turns, *lines[1:]]]
    digests = {PromptSet.load(_write(tmp_path / "c.jsonl", variant)).digest for variant in changed}
    assert len(digests) == len(changed)
    assert digest not in digests


def test_take_alternates_between_categories() -> None:
    packaged = PromptSet.packaged()
    for count in (6, 12, 30):
        categories = Counter(item.category for item in packaged.take(count))
        assert set(categories.values()) == {count // 6}
    everything = _ids(packaged.take(None))
    assert sorted(everything) == sorted(_ids(packaged)) and everything == _ids(packaged.take(1000))
    assert _ids(packaged.take(5)) == everything[:5]
    assert _ids(packaged.take(5, 5)) == everything[5:10]
    assert _ids(packaged.take(20, 40)) == everything[40:] + everything[:12]
    assert all(len({item.category for item in half.take(6)}) == 6 for half in packaged.split())


REFUSED = [
    ("{", "not JSON"),
    *((line, "'prompt', 'messages' or 'turns'") for line in ('"text"', "[]")),
    *((line, "exactly one") for line in ('{"text": "x"}', '{"prompt": "x", "turns": ["y"]}')),
    *((f'{{"prompt": {value}}}', "prompt: ") for value in ('"  "', "null", '["x"]')),
    ('{"prompt": "cut \\ud83d"}', "prompt: is not valid Unicode"),
    *(
        (f'{{"messages": {value}}}', "messages: ")
        for value in (
            "[]", '"x"', '["x"]', '[{"content": "x"}]', '[{"role": "user"}]', '[{"role": "user", "content": ""}]',
            '[{"role": 1, "content": "x"}]',
        )
    ),
    *((f'{{"turns": {value}}}', "turns: ") for value in ("[]", '"x"', '["x", ""]', '["x", 2]')),
    *((f'{{"{name}": "a", "prompt": "x"}}', "'a'.* line 1") for name in ("id", "question_id")),
    ('{"id": "q7", "prompt": 5}', "id 'q7': prompt: 5"),
    ('{"id": {"q": 7}, "prompt": "x"}', "id: {'q': 7}"),
    ('{"id": true, "prompt": "x"}', "id: True"),
    ('{"id": "\\ud83d", "prompt": "x"}', "id: is not valid Unicode"),
    ('{"category": ["code"], "prompt": "x"}', "category: "),
]  # fmt: skip


@pytest.mark.parametrize(("line", "reason"), REFUSED)
def test_a_bad_line_is_refused_with_its_file_and_number(tmp_path: Path, line: str, reason: str) -> None:
    file = _write(tmp_path / "bad.jsonl", ['{"id": "a", "prompt": "good"}', "", line, '{"prompt": "good too"}'])
    with pytest.raises(PromptError, match=f"^prompts.path: .*bad.jsonl, line 3: .*{reason}") as refusal:
        PromptSet.load(file)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"\n \n\n", b"\xff\xfe\x00", None])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "some.jsonl").write_bytes(content)
    with pytest.raises(PromptError, match=f"^prompts.path: {'cannot read ' if content is None else '.*some.jsonl'}"):
        PromptSet.load(tmp_path / "some.jsonl")


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ("one text", "^prompts: is one text"),
        (["good", 5], "^prompts: 1: prompt: 5 "),
        (["one", "two", "one"], "already used"),
        (["alone"], "at least two"),
    ],
)
def test_texts_that_are_no_prompts_or_have_no_halves_are_refused(texts: Any, reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        PromptSet.of(texts).split()
