"""llama.cpp, as of its server's documentation of October 2026: ``llama-server`` with ``--spec-type``.

``ngram-simple`` looks up n-grams of one length and copies from the last match. Drafters without a model go before one with
a model. Models are GGUF files, made by ``convert_hf_to_gguf.py`` of llama.cpp's sources.
"""

from __future__ import annotations

from typing import Any

from layerskip.config import SpeculativeConfig
from layerskip.engines.deployment import Commands, Deployment, Launch, Unsupported, left_out, openai_request, way_of_drafting

VERSION = "2026-10"
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def launch(deployment: Deployment) -> Launch:
    """Return the command that starts an OpenAI-compatible server.

    Raises:
        Unsupported: llama.cpp has no such drafter.
    """
    members = _members(deployment.config)
    parts = [Deployment(deployment.target, member, deployment.sampling, deployment.file) for member in members]
    types, values = list[str](), dict[str, Any]()
    prepare, differs = list[list[str]](), list[str]()
    model = _convert(deployment, deployment.model(prepare, hub=False), "model", prepare)
    command = ["llama-server", "--model", model]
    for part in parts:
        way, config = way_of_drafting(part), part.config
        differs += left_out(config, stops=True)
        if way == "prompt_lookup":
            types.append("ngram-simple")
            values |= {"ngram-simple-size-n": config.prompt_lookup_max, "ngram-simple-size-m": config.num_speculative_tokens}
            if config.prompt_lookup_min < config.prompt_lookup_max:
                differs.append(f"config.prompt_lookup_min: only n-grams of {config.prompt_lookup_max} tokens are looked up")
            differs += ["config.match: drafts are copied from the last match"] if config.match == "first" else []
        elif way == "draft_model":
            types.append("draft-simple")
            draft = part.draft(prepare, "llama_cpp", hub=False)
            values |= {
                "draft-model": _convert(deployment, draft, "draft", prepare),
                "draft-n-max": config.num_speculative_tokens,
            }
            values |= {"draft-p-min": config.stop.threshold} if config.stop.method == "threshold" else {}
        elif way != "none":
            raise Unsupported(f"config.method: {config.method}: llama.cpp has no such drafter")
    if types:
        values = {"type": ",".join(types)} | values
        command += [word for name, value in values.items() for word in (f"--spec-{name}", str(value))]
    request = openai_request(deployment.sampling, unlimited_k=0, penalty="repeat_penalty") | {"repeat_last_n": -1}
    method = str(values.get("type", "none"))
    return Launch(method, command, arguments=values, prepare=prepare, request=request, differs=differs)


def _members(config: SpeculativeConfig) -> tuple[SpeculativeConfig, ...]:
    """Return the drafters of a configuration; the engine combines a lookup with a draft model behind it."""
    methods = [member.method for member in config.members]
    if config.lossless and methods in (["prompt_lookup", "draft_model"], ["prompt_lookup", "layer_skip"]):
        return config.members
    return (config,)


def _convert(deployment: Deployment, folder: str, part: str, prepare: Commands) -> str:
    """Return the GGUF file of a model in a folder, and add the command that makes it."""
    file = deployment.beside(f"{part}.gguf")
    prepare.append(["python", "convert_hf_to_gguf.py", folder, "--outtype", _DTYPES[deployment.dtype], "--outfile", file])
    return file
