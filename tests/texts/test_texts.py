"""Texts that a target writes itself, repeatable and begun like prompts; its continuations, which are decoded once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from layerskip import ConfigError, PromptSet, Sampling, Target, generate, load_target
from layerskip.models.target import NotFinite
from layerskip.prompts import PromptItem
from layerskip.texts.continuations import continue_prompts
from layerskip.texts.training_texts import write_texts
from tests.families import build
from tests.reference import generated
from tests.tiny import save_tiny


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("gemma3_text", {}), ("gpt_neo", {}), ("falcon", {"alibi": True})]
)
def test_texts_are_the_targets_own_and_repeatable(family: str, changes: dict[str, bool]) -> None:
    target = Target(build(family, **changes))
    texts = list(itertools.islice(write_texts(target, Sampling(), 12, 4, 0), 6))
    assert texts == list(itertools.islice(write_texts(target, Sampling(), 12, 4, 0), 6))
    assert len({text.tokens for text in texts}) > 1
    for text in texts:
        alone = generated(target.model, text.tokens[: text.begin], 12)
        assert list(text.tokens[text.begin :]) == alone[: len(text.tokens) - text.begin]


@pytest.mark.parametrize("chat", [True, False])
def test_every_other_text_begins_like_a_prompt(chat: bool, tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path, chat=chat)))
    prompts = ["quartz one two three four", "zebra five six seven eight nine"]
    texts = list(itertools.islice(write_texts(target, Sampling(), 4, 8, 0, prompts), 8))
    written = [target.decode(text.tokens[: text.begin]) for text in texts]
    assert [any(prompt.split()[0] in text for prompt in prompts) for text in written] == [False, True] * 4
    assert not all(any(prompt in text for prompt in prompts) for text in written[1::2])
    assert len({len(text.tokens) for text in texts[1::2]}) > 1
    own = list(itertools.islice(write_texts(target, Sampling(), 4, 8, 0), 8))
    assert own != texts


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no user') }}", "its chat template refuses a user's message: TemplateError: no user"),
        ("{{ messages[0]['content'] | upper | replace('A', 'b') }}", "does not show where a user's words begin"),
    ],
)
def test_a_template_that_hides_a_users_words_is_refused(template: str, reason: str, tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path)))
    target.tokenizer.chat_template = template  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=f"^target: .*{reason}"):
        next(write_texts(target, Sampling(), 4, batch=2, seed=0))


def test_a_target_that_ends_at_once_writes_no_texts() -> None:
    target = Target(build("llama"), name="mine")
    ending = torch.zeros(64)
    ending[1] = 1e4  # the end of sequence
    target.model.get_output_embeddings().register_forward_hook(lambda _, args, output: output + ending.to(output.device))
    with pytest.raises(ConfigError, match="^target: mine writes no texts$"):
        next(write_texts(target, Sampling(), 4, batch=2, seed=0))


def test_logits_that_are_not_finite_end_the_writing() -> None:
    target = Target(build("llama"))
    with torch.no_grad():
        target.model.get_output_embeddings().weight[3] = float("nan")  # type: ignore[operator]
    for sampling in (Sampling(), Sampling(0.7, top_p=0.9)):
        with pytest.raises(NotFinite, match="^target: the largest logit of .* is nan"):
            next(write_texts(target, sampling, 4, batch=2, seed=0))


def test_continuations_are_decoded_once(tiny_target: Target, tmp_path: Path) -> None:
    prompts = PromptSet.of(["one two", "three"])
    prompts_done: list[int] = []
    first = continue_prompts(tiny_target, prompts, Sampling(), 6, folder=tmp_path)
    costs: list[tuple[str, float, float]] = []
    again = continue_prompts(
        tiny_target, prompts, Sampling(), 6, 0, tmp_path, lambda: prompts_done.append(1), lambda *cost: costs.append(cost)
    )
    other = continue_prompts(tiny_target, prompts, Sampling(), 5, folder=tmp_path)
    assert first == again
    assert len(prompts_done) == len({name for name, _, _ in costs}) == 2
    assert all(total > 0 and now == 0 for _, total, now in costs)  # decoded earlier, not in the second call
    assert [p.tokens[:5] for p in first] == [p.tokens for p in other]
    assert list(first[0].tokens) == generate(tiny_target, "one two", max_new_tokens=6).tokens


def test_a_conversation_is_continued_after_the_answers_so_far(tiny_target: Target) -> None:
    prompts = PromptSet((PromptItem("two turns", "chat", "one two", ("three", "four")),))
    answers, messages = continue_prompts(tiny_target, prompts, Sampling(), 6), list[dict[str, str]]()
    for answer, words in zip(answers, ("one two", "three", "four"), strict=True):
        messages.append({"role": "user", "content": words})
        assert list(answer.prompt) == tiny_target.encode(messages)
        messages.append({"role": "assistant", "content": tiny_target.decode(answer.tokens)})


@pytest.mark.parametrize("text", ['{"continuations": []}', "[]", "{"])
def test_a_damaged_continuation_is_decoded_again(text: str, tiny_target: Target, tmp_path: Path) -> None:
    prompts = PromptSet.of(["one two"])
    first = continue_prompts(tiny_target, prompts, Sampling(), 6, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(text)
    assert continue_prompts(tiny_target, prompts, Sampling(), 6, folder=tmp_path) == first
    assert file.read_text().partition('"seconds"')[0] == whole.partition('"seconds"')[0]
