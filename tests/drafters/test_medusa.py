"""Drafting with Medusa heads: the contract, and drafts that equal training's predictions."""

from __future__ import annotations

import torch

from layerskip.decoding.decode import decode
from layerskip.drafters.medusa import Medusa
from layerskip.heads.feature_store import TextFeatures, read_features
from layerskip.heads.readout import Readout
from layerskip.heads.training import Batch, predict_tokens
from tests.accelerator import DEVICE
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, Recorder, contract, target_of
from tests.drafters.heads import UNROLL, family_of, medusa_heads

TestMedusa = contract(
    lambda target: Medusa(medusa_heads(family_of(target)), Readout(target, None), 3, 4, 84, 0.01),
    trees=True,
    samples_by_default=False,
)


def test_drafts_equal_the_predictions_of_training() -> None:
    target, heads = target_of("llama"), medusa_heads("llama")
    checked = 0
    for prompt in PROMPTS[1:]:
        readout = Readout(target, None)
        recorder = Recorder(Medusa(heads, readout, UNROLL, 1, UNROLL, 0.0))
        tokens = (*prompt, *decode(target, recorder, prompt, GREEDY, LENGTH).tokens)
        text = TextFeatures(torch.tensor(tokens), read_features(target, tokens), 0)
        with torch.no_grad():
            predictions = predict_tokens(heads, target.model.get_input_embeddings(), Batch.of([text], DEVICE), UNROLL)
        for context, branches in recorder.drafts:
            row = len(context) - 2
            for step, token in enumerate(branches[-1] if branches else ()):
                if row < predictions[step].hidden.shape[0]:
                    assert token == int(readout(predictions[step].hidden[row]).argmax())
                    checked += 1
    assert checked > 100
