"""Overrides that the commands of several sections share."""

from __future__ import annotations

LOOKUP = "{kind:prompt_lookup,ngram_min:2,ngram_max:4,draft_length:8}"
OWN_TEXTS = "begin_like=layerskip/data/practice.jsonl"
LARGE_FIT = f"calibration_bytes=4_500_000_000 remembered_bytes=9_000_000_000 {OWN_TEXTS}"
EAGLE_TRAINING = f"steps=100000 texts_per_step=3 learning_rate=0.0006 {OWN_TEXTS}"
MEDUSA_TRAINING = f"steps=100000 max_seconds=240 {OWN_TEXTS}"


def without(group: str, *names: str) -> str:
    """Overrides that leave rows of a benchmark out."""
    return " ".join(f"{group}.{name}=null" for name in names)


def contender(name: str, *members: str) -> str:
    """An override that adds a drafter, or a cascade of several."""
    value = members[0] if len(members) == 1 else f"{{kind:cascade,members:[{','.join(members)}]}}"
    return f'"+contenders.{name}={value}"'


def eagle(head: str, chain: bool = False) -> str:
    """A drafter with an EAGLE head, by trees or by a chain."""
    tree = "draft_length:3,candidates:4,tree_tokens:8,least_probability:0.05"
    sure = "candidates:1,draft_length:5,stop:{kind:threshold,threshold:0.5}"
    return f"{{kind:eagle,head:{head},{sure if chain else tree}}}"


def with_eagle(head: str) -> str:
    """Overrides that add an EAGLE head, alone and in a cascade."""
    added = contender("eagle_chain", eagle(head, chain=True)), contender("lookup_of_cascade", LOOKUP)
    return " ".join([f"eagle_head={head}", *added, contender("lookup_then_eagle", LOOKUP, eagle(head))])
