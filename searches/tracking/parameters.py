"""The MLflow parameters of a configuration: its fields, and a summary that runs of all kinds of drafters have.

MLflow compares runs axis by axis. A run without a parameter is drawn at the end of its axis, and words are cut after ten
characters. The summary therefore has numbers where there are any, and short names.
"""

from __future__ import annotations

from layerskip import SpeculativeConfig, mask

_SHORT = {  # of the kinds whose names have more than ten characters
    "prompt_lookup": "lookup",
    "token_recycling": "recycling",
    "draft_model": "model",
    "cross_tokenizer": "cross-tok.",
}


def parameters(config: SpeculativeConfig) -> dict[str, str]:
    """Return the parameters of a configuration.

    The summary is ``drafter`` (the kind in at most ten characters), ``draft_length``, ``skipped_attention`` and
    ``skipped_mlp``. Plain decoding drafts 0 tokens; a cascade drafts as many as the member with the longest drafts.
    """
    parts = config.members or (config,)
    skipped = [mask.count_skipped(part.mask) for part in parts]
    summary: dict[str, object] = {
        "drafter": _SHORT.get(config.kind, config.kind),
        "draft_length": 0 if config.kind == "none" else max(part.draft_length for part in parts),
        "skipped_attention": sum(attention for attention, _ in skipped),
        "skipped_mlp": sum(mlp for _, mlp in skipped),
    }
    return _fields(config) | {key: str(value) for key, value in summary.items()}


def _fields(config: SpeculativeConfig) -> dict[str, str]:
    """Return the fields of a configuration and its members. A mask is a tag of the run, as it may be long."""
    stored = config.to_dict()
    fields = {key: value for key, value in stored.items() if key not in ("mask", "stop", "members")}
    for place, member in enumerate(config.members):
        fields |= {f"member_{place}_{key}": value for key, value in _fields(member).items()}
    if "stop" in stored:
        fields |= {"stop": config.stop.kind}
        if config.stop.kind != "length":
            fields["threshold"] = config.stop.threshold
    return {key: str(value) for key, value in fields.items()}
