"""Drafting with Medusa heads: the contract, and drafts that are what training foretold."""

from __future__ import annotations

import torch

from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter
from layerskip.drafters.medusa import Medusa
from layerskip.heads.feature_store import Thought, read_features
from layerskip.heads.readout import Readout
from layerskip.heads.training import Batch, foretell
from layerskip.models.target import Target
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, SAMPLINGS, DrafterContract, Recorder, target_of
from tests.drafters.heads import UNROLL, family_of, medusa_heads


class TestMedusa(DrafterContract):
    trees = True
    samplings = SAMPLINGS

    def drafter(self, target: Target) -> Drafter:
        return Medusa(medusa_heads(family_of(target)), Readout(target, None), 3, 4, 84, 0.01)


def test_drafts_are_what_training_foretold() -> None:
    target, heads = target_of("llama"), medusa_heads("llama")
    looked = 0
    for prompt in PROMPTS[1:]:
        readout = Readout(target, None)
        recorder = Recorder(Medusa(heads, readout, UNROLL, 1, UNROLL, 0.0))
        tokens = (*prompt, *decode(target, recorder, prompt, GREEDY, LENGTH).tokens)
        text = Thought(torch.tensor(tokens), read_features(target, tokens, heads.shape.modules), 0)
        with torch.no_grad():
            said = foretell(heads, target.model.get_input_embeddings(), Batch.of([text], heads), UNROLL)
        for context, branches in recorder.drafts:
            row = len(context) - 2
            for step, token in enumerate(branches[-1] if branches else ()):
                if row < said[step].made.shape[0]:
                    assert token == int(readout(said[step].made[row]).argmax())
                    looked += 1
    assert looked > 100
