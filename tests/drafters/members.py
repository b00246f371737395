"""Who takes part in cascades: drafters of every kind, and made-up ones whose drafts and memory a test can look into."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, Finder, Said
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.tree import path_to
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Members
from layerskip.drafters.cross_tokenizer import CrossTokenizer
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import Eagle
from layerskip.drafters.medusa import Medusa
from layerskip.drafters.registry import build_drafter
from layerskip.drafters.token_translation import Translation
from layerskip.heads.readout import Readout
from layerskip.models.cache import KVCache
from layerskip.models.target import Target
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, DrafterContract, target_of
from tests.drafters.heads import eagle_head, medusa_heads
from tests.drafters.test_cross_tokenizer import LETTERS, _spelling

LOOKUP = {"kind": "prompt_lookup", "ngram_min": 2, "ngram_max": 3, "draft_length": 4}
SKIP = {"kind": "layer_skip", "mask": "attention:0;mlp:1", "draft_length": 3}

Open = list[tuple[int, int, list[list[int]]]]
"""Drafts that the text has not caught up with: where they begin, behind a match of how many tokens, and their branches."""


def member_of(kind: str, target: Target) -> Drafter:
    tree = {"least_probability": 0.0}
    fields: dict[str, dict[str, object]] = {
        "prompt_lookup": LOOKUP,
        "retrieval": {"ngram_min": 2, "ngram_max": 3, "draft_length": 4} | tree,
        "token_recycling": {"draft_length": 3} | tree,
        "lookahead": {"draft_length": 2, "window": 3, "candidates": 2},
        "layer_skip": SKIP,
    }
    if kind in fields:
        return build_drafter(SpeculativeConfig.from_dict({"kind": kind} | fields[kind]), target)
    if kind == "eagle":
        head = eagle_head("llama")
        return Eagle(head, target.model.get_input_embeddings(), Readout(target, head.tokens), 3, StopRule())
    if kind == "medusa":
        return Medusa(medusa_heads("llama"), Readout(target, None), 3, 4, 20, 0.01)
    if kind == "draft_model":
        return DraftModel(target.model, target.layers, 3, StopRule())
    letters = _spelling(LETTERS[: target.vocabulary])
    return CrossTokenizer(target.model, target.layers, target.vocabulary, Translation(letters, letters), 3, StopRule())


class Choosing(DrafterContract):
    """What became of drafts is remembered; it is seen where it changes who drafts, which behind few tokens it need not."""

    learns = True
    remembers = True

    def test_what_was_learnt_lasts_until_it_is_forgotten(self) -> None:
        target = target_of("llama")
        drafter = self.drafter(target)
        assert isinstance(drafter, Members)
        runs = []
        for _ in range(2):
            drafter.forget()
            runs.append([decode(target, drafter, prompt, GREEDY, LENGTH).stats for prompt in PROMPTS * 2])
        assert runs[0] == runs[1]


class Member:
    """Drafts a token whenever it is told to, and remembers what it is told."""

    tree_tokens = 0
    finds = False
    at_once = False

    def __init__(self) -> None:
        self.proposes = True
        self.told: list[str] = []

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self.told.append("start")

    def draft(self, context: Context, limit: int) -> Draft:
        self.told.append("draft")
        return Draft(torch.tensor([1] if self.proposes else [], dtype=torch.int64))

    def observe(self, verdict: Verdict) -> None:
        self.told.append("observe")

    def hear(self, said: Said) -> None:
        self.told.append("hear")


class Told(Member):
    """Drafts the next tokens of a text, of which some are wrong, where it is in the mood to."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__()
        self.text, self.mood, self.right, self.talks = text, random.Random(3), 0.7, 0.9

    def draft(self, context: Context, limit: int) -> Draft:
        said = [token if self.mood.random() < self.right else 9 for token in self.text[len(context.tokens) :][:2]]
        return Draft(torch.tensor(said if self.mood.random() < self.talks else [], dtype=torch.int64))


class ResultLog(Member):
    """Another drafter, and its last draft."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter, self.tree_tokens = drafter, drafter.tree_tokens
        self.finds = isinstance(drafter, Finder) and drafter.finds
        self.last = Draft.empty(torch.device("cpu"))

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self.drafter.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        self.last = self.drafter.draft(context, limit)
        return self.last


class ToldForNothing(Told):
    """The same, and who passes it over has lost nothing."""

    finds = True

    def draft(self, context: Context, limit: int) -> Draft:
        said = super().draft(context, limit).tokens.tolist()
        return Draft.of_tree(said, range(-1, len(said) - 1), context.last.device, found=True)


class Trees(Member):
    """Drafts the same tree ever again: two branches of two tokens, of which it thinks the first likelier."""

    finds = True

    def draft(self, context: Context, limit: int) -> Draft:
        return Draft.of_tree([1, 2, 3, 4], [-1, 0, -1, 2], context.last.device, found=True, chances=[0.6, 0.5, 0.3, 0.2])


def branches_of(draft: Draft) -> list[list[int]]:
    tokens = draft.tokens.tolist()
    parents = draft.parents or range(-1, len(tokens) - 1)
    return [[tokens[at] for at in path_to(node, parents)] for node in range(len(tokens))]


def run_along(branches: list[list[int]], text: Sequence[int]) -> int:
    """The most tokens of a text that one of the branches has."""
    return max((len(branch) for branch in branches if list(text[: len(branch)]) == branch), default=0)


def score(
    open_drafts: Open, earned: dict[int, list[int]], text: Sequence[int], reached: dict[tuple[int, int], list[int]]
) -> None:
    """Add what open drafts have earned, as far as the text tells, and whether as much as each depth; close those."""
    for begin, match, branches in list(open_drafts):
        run, whole = run_along(branches, text[begin:]), max(map(len, branches))
        if begin + run < len(text) or run == whole:
            earned.setdefault(match, []).append(run)
            for depth in range(1, whole + 1):
                reached.setdefault((match, depth), []).append(run >= depth)
            open_drafts.remove((begin, match, branches))


def mean(values: list[int], hope: float = 0) -> float:
    """Of the values and one more."""
    assert len(values) <= 128  # of more, the first ones would fade
    return (sum(values) + hope) / (len(values) + 1)
