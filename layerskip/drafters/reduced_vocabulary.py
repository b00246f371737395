"""Draft models and output layers that are reduced to a part of the vocabulary."""

from __future__ import annotations

from pathlib import PurePath

from transformers import PreTrainedModel

from layerskip.config import SpeculativeConfig
from layerskip.models.architecture import UnsupportedModel, check_rewind
from layerskip.models.draft_head import DraftHead, load_draft_tokens
from layerskip.models.loading import load_draft
from layerskip.models.skip_view import decoding_view, shared_copy
from layerskip.models.target import Target


def load_draft_model(config: SpeculativeConfig, target: Target, same_tokenizer: bool = True) -> Target:
    """Load the draft model that a configuration names.

    Raises:
        TargetError: it cannot be loaded.
        UnsupportedModel: its cache cannot be rewound.
    """
    draft = load_draft(target, config.draft, same_tokenizer)
    try:
        check_rewind(draft.model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"draft: {error}") from error
    return draft


def draft_view(draft: Target, config: SpeculativeConfig, owner: Target) -> tuple[PreTrainedModel, DraftHead | None]:
    """Return a view of a draft model with the configured output layer, and its reduced vocabulary if any.

    Args:
        draft: the draft model.
        config: names the reduced vocabulary.
        owner: the model whose tokens the reduced vocabulary was chosen from.
    """
    view = shared_copy(draft.model) if config.draft_head else decoding_view(draft.model)
    return view, reduce_output(view, draft.model, config, owner)


def reduce_output(
    view: PreTrainedModel, model: PreTrainedModel, config: SpeculativeConfig, owner: Target
) -> DraftHead | None:
    """Reduce a view's output layer to the tokens of ``config.draft_head``.

    Args:
        view: the view to change.
        model: the model of the view, which stays as it is.
        config: the configuration of the drafter.
        owner: the target that the draft head belongs to.

    Returns:
        The reduced vocabulary; None if the configuration names none, and the view is unchanged.
    """
    if not config.draft_head:
        return None
    head = DraftHead(model, load_draft_tokens(config.draft_head, owner), owner.vocabulary)
    head.restrict(view)
    return head


def draft_label(config: SpeculativeConfig) -> str:
    """Return the draft model and its reduced vocabulary, for a configuration's label."""
    return config.draft + (f", {PurePath(config.draft_head).name}" if config.draft_head else "")
