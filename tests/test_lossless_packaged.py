"""On a real model in float32, every drafter gives the output of transformers on the packaged prompts.

By default, one drafter of each sort decodes few tokens of two prompts. ``make lossless`` runs every drafter on all prompts
and takes more than an hour.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import PromptSet, Sampling, SkipMask, SpeculativeConfig, Target, TargetError, save_draft_checkpoint
from layerskip.bridges.bridge import BridgeShape, save_bridges
from layerskip.bridges.fit import Calibration
from layerskip.decoding.decode import decode
from layerskip.drafters.datastore import Datastore
from layerskip.drafters.registry import build_drafter
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.feature_store import TextFeatures, read_features
from layerskip.heads.induction import add_induction_heads
from layerskip.heads.medusa import MedusaHeads, MedusaShape
from layerskip.heads.readout import Readout, choose_tokens
from layerskip.heads.training import fit_linear
from layerskip.models.compiled_layers import compiled_layers, set_compiling
from layerskip.models.draft_head import save_draft_tokens
from layerskip.models.loading import find_weights, load_draft
from layerskip.models.skip_view import decoding_view
from layerskip.models.trained_module import save_trained
from layerskip.texts.continuations import Continuation
from tests.exhaustive import EXHAUSTIVE, representative

NEW_TOKENS = 64 if EXHAUSTIVE else 16
BATCH = 8
PROMPTS = PromptSet.packaged().take(None if EXHAUSTIVE else 6)


def _lookup(least: int = 2, tokens: int = 8) -> dict[str, Any]:
    return {
        "method": "prompt_lookup",
        "prompt_lookup_min": least,
        "prompt_lookup_max": 4,
        "num_speculative_tokens": tokens,
    }


def _drafter(method: str, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": tokens} | fields


def _cascade(*members: dict[str, Any], **costs: Any) -> dict[str, Any]:
    return {"method": "cascade", "members": members} | costs


_RECYCLING = _drafter("token_recycling", 6, tree_tokens=8, top_k=4)
_THRESHOLD = {"method": "threshold", "threshold": 0.5}
_ADAPTIVE = {"method": "adaptive", "threshold": 0.6}
CONFIGS: list[dict[str, Any]] = representative(
    [
        {"method": "none"},
        _lookup(tokens=10),
        _drafter("layer_skip", 3, mask="layers:12-20", siblings=2),
        _drafter("eagle", 4, top_k=3, tree_tokens=10),
        _cascade(_lookup(), _RECYCLING),
    ],
    [
        _drafter("retrieval", 16, tree_tokens=24),
        _drafter("lookahead", 3, window=4),
        _drafter("token_recycling", 5, tree_tokens=12),
        _drafter("layer_skip", 6, mask="attention:0,7;mlp:7,12;layers:15", stop=_THRESHOLD),
        _drafter("layer_skip", 4, mask="layers:2-11", bridge="linear", draft_head="common_tokens", stop=_ADAPTIVE),
        _drafter(
            "layer_skip", 3, mask="attention:3;layers:12-16;mlp:20", bridge="mlp", draft_head="common_tokens", siblings=2
        ),
        _drafter("draft_model", 5, stop=_THRESHOLD),
        _drafter("draft_model", 5, draft_head="common_tokens", stop=_ADAPTIVE),
        _drafter("cross_tokenizer", 4),
        _drafter("cross_tokenizer", 4, draft_head="draft_common_tokens"),
        _drafter("cross_tokenizer", 4, draft_model="gemma3"),  # the real pair
        _drafter("retrieval", 6, tree_tokens=12, datastore="answers"),
        _drafter("eagle", 4, top_k=1),
        _drafter("medusa", 3, tree_tokens=8, min_token_prob=0.0),
        _cascade(_lookup(tokens=10), _drafter("layer_skip", 3, mask="layers:12-14", bridge="mean")),
        _cascade(_drafter("eagle", 4, top_k=1, stop={"method": "threshold", "threshold": 0.2}), _RECYCLING),
        _cascade(
            _lookup(1),
            _drafter("retrieval", 8, tree_tokens=16),
            _drafter("token_recycling", 6, tree_tokens=16, top_k=4, min_token_prob=0.02),
            verify_cost=[1.1, 1.15, 1.2, 1.25],
        ),
        _cascade(
            _lookup(),
            _drafter("eagle", 3, top_k=4, tree_tokens=8, min_token_prob=0.05),
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


@pytest.fixture(scope="module")
def draft_folder(smollm2: Target) -> Iterator[str]:
    """The model without three layers as an ordinary checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(save_draft_checkpoint(smollm2, SkipMask.parse("layers:7,12,15", 30), Path(folder) / "draft"))


@pytest.fixture(scope="module")
def common_tokens(smollm2: Target, reference: dict[str, list[int]]) -> torch.Tensor:
    """The most common tokens of the outputs, including ends of sequences."""
    outputs = torch.tensor([token for tokens in reference.values() for token in tokens])
    return choose_tokens(outputs.bincount(minlength=smollm2.vocabulary), 512, sorted(smollm2.eos_ids))


@pytest.fixture(scope="module")
def heads(
    smollm2: Target, reference: dict[str, list[int]], common_tokens: torch.Tensor, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Folders of heads over the most common tokens, with some acceptance.

    EAGLE's linear map is fitted in closed form to some of the outputs, and its attention copies earlier text. Medusa's heads
    are untrained and predict alternatives to the last token.
    """
    eagle = EagleHead(EagleShape.of(smollm2, vocabulary=512, lookback=2), common_tokens)
    texts = [(*smollm2.encode(item.messages()), *reference[item.id]) for item in PROMPTS.take(3)]
    read = eagle.shape.modules
    feature_texts = [TextFeatures(torch.tensor(tokens), read_features(smollm2, tokens, read), 1) for tokens in texts]
    fit_linear(eagle, smollm2.model.get_input_embeddings(), feature_texts)
    add_induction_heads(
        eagle,
        smollm2.model.get_input_embeddings(),
        Readout(smollm2, common_tokens),
        torch.cat([text.tokens for text in feature_texts]),
    )
    medusa = MedusaHeads(MedusaShape(smollm2.hidden, 3, read, 512), common_tokens)
    folders = {method: tmp_path_factory.mktemp(method) for method in ("eagle", "medusa")}
    save_trained(folders["eagle"], "eagle", eagle.shape.to_dict(), eagle.weights(), smollm2, {})
    save_trained(folders["medusa"], "medusa", medusa.shape.to_dict(), medusa.state_dict(), smollm2, {})
    return {method: str(folder) for method, folder in folders.items()}


@pytest.fixture(scope="module")
def fitted(
    smollm2: Target,
    reference: dict[str, list[int]],
    common_tokens: torch.Tensor,
    draft_folder: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[SpeculativeConfig], SpeculativeConfig]:
    """Replaces names in a configuration by folders of bridges, draft heads and a datastore made from some of the outputs."""
    some = list(PROMPTS.take(6))
    texts = [(tuple(smollm2.encode(item.messages())), tuple(reference[item.id])) for item in some]
    folder = tmp_path_factory.mktemp("fitted")
    Datastore.build([tokens for _, tokens in texts], smollm2).save(folder / "answers")
    save_draft_tokens(folder / "common_tokens", common_tokens, smollm2, {})
    save_draft_tokens(folder / "draft_common_tokens", common_tokens, load_draft(smollm2, draft_folder), {})
    continuations = [Continuation(item.id, item.category, *text, NEW_TOKENS) for item, text in zip(some, texts, strict=True)]
    calibration = Calibration(smollm2, continuations, 2**30)

    def bridged(mask: str, method: str) -> str:
        bridge = folder / f"{method}-{mask}"
        if not bridge.exists():
            size = {"mean": {}, "linear": {"rank": 64}, "mlp": {"rank": 16, "width": 32}}[method]
            shape = BridgeShape.of(smollm2, SkipMask.parse(mask, smollm2.layers), method, **size)
            save_bridges(bridge, calibration.fit(shape).bridges, smollm2, {})
        return str(bridge)

    def fill(config: SpeculativeConfig) -> SpeculativeConfig:
        named = {
            name: str(folder / str(getattr(config, name))) for name in ("draft_head", "datastore") if getattr(config, name)
        }
        if config.bridge:
            named["bridge"] = bridged(config.mask, config.bridge)
        return replace(config, **named, members=tuple(map(fill, config.members)))  # type: ignore[arg-type]

    return fill


@pytest.mark.parametrize(("number", "fields"), list(enumerate(CONFIGS)), ids=[fields["method"] for fields in CONFIGS])
def test_every_drafter_gives_the_output_of_transformers(
    smollm2: Target, reference: dict[str, list[int]], number: int, fields: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    fields = copy.deepcopy(fields)
    if fields.get("draft_model") == "gemma3":
        try:
            find_weights("gemma3")
        except TargetError as error:
            pytest.skip(str(error))
    elif fields["method"] in ("draft_model", "cross_tokenizer"):
        fields["draft_model"] = request.getfixturevalue("draft_folder")
    for part in (fields, *fields.get("members", ())):
        if part["method"] in ("eagle", "medusa"):
            part["head"] = request.getfixturevalue("heads")[part["method"]]
    config = SpeculativeConfig.from_dict(fields)
    if any(part.bridge or part.draft_head or part.datastore for part in (config, *config.members)):
        config = request.getfixturevalue("fitted")(config)
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
    smollm2: Target, reference: dict[str, list[int]], fields: dict[str, Any]
) -> None:
    """In chains, trees and a self-draft; all of them run in the static shapes of captured passes."""
    compiled = replace(smollm2, compile="on")
    try:
        drafter = build_drafter(SpeculativeConfig.from_dict(fields), compiled)
        outputs = {
            item.id: decode(compiled, drafter, smollm2.encode(item.messages()), Sampling(), NEW_TOKENS).tokens
            for item in PROMPTS
        }
        view = decoding_view(smollm2.model)
        assert compiled_layers(view) is not None
    finally:
        set_compiling(smollm2.model, "auto")
    assert outputs == {item.id: reference[item.id] for item in PROMPTS}
