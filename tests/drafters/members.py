"""Members of cascades: drafters of every method, and scripted ones that record their calls."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import CascadeBase
from layerskip.drafters.cross_tokenizer import CrossTokenizer, Translation
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import Eagle
from layerskip.drafters.medusa import Medusa
from layerskip.drafters.registry import build_drafter
from layerskip.heads.readout import Readout
from layerskip.models.cache import KVCache
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from tests.drafters.contract import FEW_PROMPTS, GREEDY, LENGTH, DrafterContract, target_of
from tests.drafters.heads import eagle_head, medusa_heads
from tests.drafters.recorder import branches_of

LETTERS = string.ascii_lowercase
LOOKUP = {"method": "prompt_lookup", "prompt_lookup_min": 2, "prompt_lookup_max": 3, "num_speculative_tokens": 4}
SKIP: dict[str, object] = {"method": "layer_skip", "mask": "attention:0;mlp:1", "num_speculative_tokens": 3}

Open = list[tuple[int, int, list[tuple[int, ...]]]]
"""Drafts that the text has not decided: where they start, the lengths of their matches, and their branches."""


SECONDS = ("prompt_lookup", "retrieval", "token_recycling", "lookahead", "layer_skip")
"""Methods without trained parts or other models, which :func:`member_of` makes for every target."""


def spelling(pieces: str, pairs: tuple[str, ...] = (), end: str | None = None) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of single letters, and of some pairs of them."""
    words = {piece: number for number, piece in enumerate([*pieces, *pairs])}
    model = Tokenizer(models.BPE(words, [(pair[0], pair[1]) for pair in pairs]))
    model.decoder = decoders.Fuse()
    if end is not None:
        model.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=end)


def skip_of(target: Target) -> dict[str, object]:
    """Returns the fields of a self-draft of a target of one layer or several."""
    return SKIP | {"mask": "attention:0" if target.layers == 1 else SKIP["mask"]}


def member_of(method: str, target: Target) -> Drafter:
    """Returns a drafter of a method."""
    tree = {"min_token_prob": 0.0}
    fields: dict[str, dict[str, object]] = {
        "none": {},
        "prompt_lookup": LOOKUP,
        "retrieval": {"prompt_lookup_min": 2, "prompt_lookup_max": 3, "num_speculative_tokens": 4} | tree,
        "token_recycling": {"num_speculative_tokens": 3} | tree,
        "lookahead": {"num_speculative_tokens": 2, "window": 3, "guess_set_size": 2},
        "layer_skip": skip_of(target),
        "cascade": {"members": [LOOKUP, SKIP]},
    }
    if method in fields:
        return build_drafter(SpeculativeConfig.from_dict({"method": method} | fields[method]), target)
    if method == "eagle":
        head = eagle_head("llama")
        return Eagle(head, target.model.get_input_embeddings(), Readout(target, head.tokens), 3, StopRule())
    if method == "medusa":
        return Medusa(medusa_heads("llama"), Readout(target, None), 3, 4, 20, 0.01)
    if method == "draft_model":
        return DraftModel(decoding_view(target.model), target.layers, 3, StopRule())
    letters = spelling(LETTERS[: target.vocabulary])
    return CrossTokenizer(
        decoding_view(target.model), target.layers, target.vocabulary, Translation(letters, letters), 3, StopRule()
    )


class Choosing(DrafterContract):
    """The contract of cascades. Their estimates show only in the choice of members, which few tokens need not change."""

    history_dependent = True
    keeps_state = True

    def test_state_lasts_until_it_is_reset(self) -> None:
        target = target_of("llama")
        drafter = self.drafter(target)
        assert isinstance(drafter, CascadeBase)
        runs = []
        for _ in range(2):
            drafter.reset_state()
            runs.append([decode(target, drafter, prompt, GREEDY, LENGTH).stats for prompt in FEW_PROMPTS * 2])
        assert runs[0] == runs[1]


class Member(Drafter):
    """Drafts a token while ``proposes`` is True, and counts its verdicts."""

    def __init__(self, proposes: bool = True) -> None:
        self.proposes, self.verdicts = proposes, 0

    def draft(self, context: Context, limit: int) -> Draft:
        return Draft(torch.tensor([1] if self.proposes else [], dtype=torch.int64, device=context.last.device))

    def observe(self, verdict: Verdict) -> None:
        self.verdicts += 1


class ScriptedMember(Member):
    """Drafts the next tokens of a text, some of them wrong, in a part of the rounds."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__()
        self.text, self.random, self.hit_rate, self.draft_rate = text, random.Random(3), 0.7, 0.9

    def draft(self, context: Context, limit: int) -> Draft:
        tokens = [token if self.random.random() < self.hit_rate else 9 for token in self.text[len(context.tokens) :][:2]]
        drafted = tokens if self.random.random() < self.draft_rate else []
        return Draft(torch.tensor(drafted, dtype=torch.int64, device=context.last.device))


class ResultLog(Member):
    """Another drafter, and its last draft."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter, self.tree_tokens = drafter, drafter.tree_tokens
        self.lookup = drafter.lookup
        self.last: Draft | None = None

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self.drafter.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        self.last = self.drafter.draft(context, limit)
        return self.last


class Trees(Member):
    """Always drafts the same tree of two branches of two tokens, the first one likelier."""

    lookup = True

    def draft(self, context: Context, limit: int) -> Draft:
        return Draft.of_lookup([1, 2, 3, 4], [-1, 0, -1, 2], context.last.device, path_probs=[0.6, 0.5, 0.3, 0.2])


def play(
    cascade: CascadeBase, members: Sequence[ResultLog], text: Sequence[int], known: int, end: int, limit: int = 4
) -> Iterator[tuple[int, Draft, int]]:
    """Verifies a cascade's drafts against a text; yields each round's context length, draft and accepted tokens.

    A member that is not asked has None as its last draft.
    """
    while known < end:
        for member in members:
            member.last = None
        draft = cascade.draft(Context(list(text[:known]), torch.tensor(text[known - 1 : known])), limit)
        accepted = run_along(branches_of(draft), text[known:])
        yield known, draft, accepted
        cascade.observe(Verdict(tuple(draft.tokens.tolist()), accepted, text[known + accepted], torch.tensor([0])))
        known += accepted + 1


def run_along(branches: list[tuple[int, ...]], text: Sequence[int]) -> int:
    """Returns how many tokens of a text the best branch has."""
    return max((len(branch) for branch in branches if tuple(text[: len(branch)]) == branch), default=0)


def score(open_drafts: Open, earned: dict[int, list[int]], text: Sequence[int]) -> None:
    """Score open drafts as far as the text decides them, and close those."""
    for begin, match, branches in list(open_drafts):
        run = run_along(branches, text[begin:])
        if begin + run < len(text) or run == max(map(len, branches)):
            earned.setdefault(match, []).append(run)
            open_drafts.remove((begin, match, branches))


def mean(values: list[int], hope: float = 0) -> float:
    """Returns the mean of the values and one more."""
    assert len(values) <= 128  # of more, the first ones would fade
    return (sum(values) + hope) / (len(values) + 1)
