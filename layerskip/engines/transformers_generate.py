"""transformers, as of version 5.23: ``generate`` with its own drafters, or with this library's as ``custom_generate``.

Its prompt lookup copies from the first match. A confidence threshold and the schedule of draft lengths are fields of the
assistant's generation configuration. What it cannot draft, ``custom_generate`` does, exactly as it was measured.
"""

from __future__ import annotations

from typing import Any

from layerskip.engines.deployment import Deployment, Launch, Unsupported, left_out, way_of_drafting

VERSION = "5.23"


def launch(deployment: Deployment) -> Launch:
    """Return the call that loads the model and generates; every configuration has one."""
    try:
        return _own(deployment, way_of_drafting(deployment))
    except Unsupported:
        return _custom(deployment)


def _own(deployment: Deployment, way: str) -> Launch:
    """Return a call of transformers' own drafters, which need no package but transformers."""
    config = deployment.config
    if way in ("eagle", "eagle3", "medusa") or config.method == "layer_skip":
        return _custom(deployment)
    prepare, differs = list[list[str]](), left_out(config, stops=True)
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        *_load("model", "tokenizer", deployment.model(prepare), deployment),
    ]
    values, assistant, further = dict[str, Any](), dict[str, Any](), ""
    if way == "prompt_lookup":
        values = {
            "prompt_lookup_num_tokens": config.num_speculative_tokens,
            "max_matching_ngram_size": config.prompt_lookup_max,
        }
        differs += ["config.match: drafts are copied from the first match"] if config.match == "last" else []
        differs += [f"config.prompt_lookup_min: matches of fewer than {config.prompt_lookup_min} tokens count, too"] * (
            config.prompt_lookup_min > 1
        )
    elif way != "none":
        threshold = config.stop.threshold if config.stop.method == "threshold" else 0.0
        assistant = {"num_assistant_tokens": config.num_speculative_tokens, "num_assistant_tokens_schedule": "constant"}
        assistant |= {"assistant_confidence_threshold": threshold}
        lines += _load("assistant", "assistant_tokenizer", deployment.draft(prepare, "transformers"), deployment, False)
        lines += [f"assistant.generation_config.{name} = {value!r}" for name, value in assistant.items()]
        further = ", assistant_model=assistant"
        further += ", tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer" if way == "cross_tokenizer" else ""
    request = _request(deployment)
    options = "".join(f", {name}={value!r}" for name, value in (request | values).items())
    lines += [
        'inputs = tokenizer(prompt, return_tensors="pt")',
        f"output = model.generate(**inputs, max_new_tokens=64{options}{further})",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    method = {"none": "none", "prompt_lookup": "prompt_lookup_num_tokens"}.get(way, "assistant_model")
    return Launch(method, "", "\n".join(lines), values | assistant, prepare, request, differs)


def _custom(deployment: Deployment) -> Launch:
    """Return a call with this library's decoding loop in ``generate``."""
    target, request = deployment.target, _request(deployment)
    loading = {"revision": target.get("revision"), "dtype": target["dtype"], "quantization": target.get("quantization")}
    given = "".join(f", {name}={value!r}" for name, value in loading.items() if value is not None)
    options = "".join(f", {name}={value!r}" for name, value in request.items())
    lines = [
        "import layerskip",
        f"target = layerskip.load_target({target['name']!r}{given})",
        f"export = layerskip.Export.load({str(deployment.file)!r}, target)",
        "method = export.custom_generate(target.tokenizer)",
        'inputs = target.tokenizer(prompt, return_tensors="pt").to(target.device)',
        f"output = target.model.generate(**inputs, custom_generate=method, max_new_tokens=64{options})",
        'print(target.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    return Launch("custom_generate", call="\n".join(lines), request=request)


def _load(model: str, tokenizer: str, name: str, deployment: Deployment, revised: bool = True) -> list[str]:
    """Return the statements that load a model and its tokenizer."""
    revision = deployment.target.get("revision") if revised else None
    given = "" if revision is None else f", revision={revision!r}"
    return [
        f"{tokenizer} = AutoTokenizer.from_pretrained({name!r}{given})",
        f"{model} = AutoModelForCausalLM.from_pretrained({name!r}{given}, dtype={deployment.dtype!r})",
    ]


def _request(deployment: Deployment) -> dict[str, Any]:
    sampling = deployment.sampling
    fields: dict[str, Any] = {"do_sample": not sampling.greedy, "repetition_penalty": sampling.repetition_penalty}
    if not sampling.greedy:
        fields |= {"temperature": sampling.temperature, "top_k": int(sampling.top_k)}
        fields |= {"top_p": sampling.top_p, "min_p": sampling.min_p}
    return fields
