"""The MLflow parameters of a configuration: a summary that runs of all methods have, and the fields of its method.

MLflow compares runs axis by axis. A run without a parameter is drawn at the end of its axis, and words are cut after ten
characters. The summary therefore has numbers where there are any, and short names. A comparison begins with the first
three parameters of the alphabet, so the names of the others begin with ``with_``.
"""

from __future__ import annotations

from layerskip import SpeculativeConfig, mask
from layerskip.config import methods


def parameters(config: SpeculativeConfig) -> dict[str, str]:
    """Return the parameters of a configuration.

    The summary is ``drafter`` (the method in at most ten characters), ``num_speculative_tokens``, ``skipped_attention`` and
    ``skipped_mlp``. Plain decoding drafts 0 tokens; a cascade drafts as many as the member with the longest drafts. The
    fields of the method follow, such as ``with_prompt_lookup_max``, and those of members, such as ``with_member_0_method``.
    """
    parts = config.members or (config,)
    skipped = [mask.count_skipped(part.mask) for part in parts]
    summary: dict[str, object] = {
        "drafter": methods()[config.method].short,
        "num_speculative_tokens": 0 if config.method == "none" else max(part.num_speculative_tokens for part in parts),
        "skipped_attention": sum(attention for attention, _ in skipped),
        "skipped_mlp": sum(mlp for _, mlp in skipped),
    }
    fields = {
        f"with_{key}": value for key, value in _fields(config).items() if key not in ("method", "num_speculative_tokens")
    }
    return {key: str(value) for key, value in summary.items()} | fields


def _fields(config: SpeculativeConfig) -> dict[str, str]:
    """Return the fields of a configuration and its members. A mask is a tag of the run, because it may be long."""
    stored = config.to_dict()
    fields = {key: value for key, value in stored.items() if key not in ("mask", "stop", "members")}
    for place, member in enumerate(config.members):
        fields |= {f"member_{place}_{key}": value for key, value in _fields(member).items()}
    if "stop" in stored:
        fields |= {"stop": config.stop.method}
        if config.stop.method != "length":
            fields["threshold"] = config.stop.threshold
    return {key: str(value) for key, value in fields.items()}
