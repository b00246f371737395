"""The MLflow parameters of a configuration: a summary that runs of all kinds of drafters have, and the fields of its kind.

MLflow compares runs axis by axis. A run without a parameter is drawn at the end of its axis, and words are cut after ten
characters. The summary therefore has numbers where there are any, and short names. A comparison begins with the first
three parameters of the alphabet, so the names of the others begin with ``with_``.
"""

from __future__ import annotations

from layerskip import SpeculativeConfig, mask
from layerskip.config import kinds


def parameters(config: SpeculativeConfig) -> dict[str, str]:
    """Return the parameters of a configuration.

    The summary is ``drafter`` (the kind in at most ten characters), ``draft_length``, ``skipped_attention`` and
    ``skipped_mlp``. Plain decoding drafts 0 tokens; a cascade drafts as many as the member with the longest drafts. The
    fields of the kind follow, such as ``with_ngram_max``, and those of a cascade's members, such as ``with_member_0_kind``.
    """
    parts = config.members or (config,)
    skipped = [mask.count_skipped(part.mask) for part in parts]
    summary: dict[str, object] = {
        "drafter": kinds()[config.kind].short,
        "draft_length": 0 if config.kind == "none" else max(part.draft_length for part in parts),
        "skipped_attention": sum(attention for attention, _ in skipped),
        "skipped_mlp": sum(mlp for _, mlp in skipped),
    }
    fields = {f"with_{key}": value for key, value in _fields(config).items() if key not in ("kind", "draft_length")}
    return {key: str(value) for key, value in summary.items()} | fields


def _fields(config: SpeculativeConfig) -> dict[str, str]:
    """Return the fields of a configuration and its members. A mask is a tag of the run, because it may be long."""
    stored = config.to_dict()
    fields = {key: value for key, value in stored.items() if key not in ("mask", "stop", "members")}
    for place, member in enumerate(config.members):
        fields |= {f"member_{place}_{key}": value for key, value in _fields(member).items()}
    if "stop" in stored:
        fields |= {"stop": config.stop.kind}
        if config.stop.kind != "length":
            fields["threshold"] = config.stop.threshold
    return {key: str(value) for key, value in fields.items()}
