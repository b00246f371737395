"""Which drafter does a configuration ask for, on which target?"""

from __future__ import annotations

from transformers import PreTrainedModel

from ..anatomy import UnsupportedModel, check_rewind
from ..bridge import load_bridges
from ..config import ConfigError, SpeculativeConfig
from ..datastore import Datastore
from ..draft_head import DraftHead, load_draft_tokens
from ..eagle import load_eagle
from ..loading import load_draft
from ..mask import MaskError, SkipMask
from ..medusa import load_medusa
from ..readout import Readout
from ..target import Target
from ..translation import Translation, UnalignedTokenizers
from ..tree import tree_model
from ..view import decoding_view, kept_skip_view, skip_view, twin
from .base import Drafter, NoDraft
from .cascade import Cascade
from .cross_tokenizer import CrossTokenizer
from .draft_model import DraftModel
from .eagle import Eagle
from .layer_skip import LayerSkip
from .lookahead import Lookahead
from .medusa import Medusa
from .priced_cascade import PricedCascade
from .prompt_lookup import PromptLookup
from .retrieval import Retrieval
from .token_recycling import TokenRecycling


def build_drafter(config: SpeculativeConfig, target: Target) -> Drafter:
    """The drafter of a configuration, ready for any number of prompts.

    Raises:
        ConfigError: the configuration does not fit the target.
        UnsupportedModel: the target, or the draft model, cannot be decoded so.
        TargetError: the draft model cannot be loaded.
    """
    check_rewind(target.model)
    drafter = _build(config, target)
    if drafter.tree_tokens:
        tree_model(target.model)  # refuses by name
    return drafter


def _build(config: SpeculativeConfig, target: Target) -> Drafter:
    match config.kind:
        case "none":
            return NoDraft()
        case "layer_skip":
            try:
                mask = SkipMask.parse(config.mask, target.layers)
            except MaskError as error:
                raise ConfigError(str(error)) from None
            bridges = load_bridges(config.bridge, target, mask) if config.bridge else None
            own = bridges is not None or config.draft_head  # what is narrowed is nobody else's
            view = skip_view(target.model, mask, bridges) if own else kept_skip_view(target.model, mask)
            head = _narrowed(view, target.model, config, target)
            return LayerSkip(view, config.draft_length, config.stop, config.siblings, config.least_probability, head)
        case "prompt_lookup":
            return PromptLookup(config.ngram_min, config.ngram_max, config.match, config.draft_length)
        case "retrieval":
            datastore = Datastore.load(config.datastore, target) if config.datastore else None
            shape = config.draft_length, config.tree_tokens, config.least_probability
            return Retrieval(datastore, config.ngram_min, config.ngram_max, *shape)
        case "token_recycling":
            return TokenRecycling(config.draft_length, config.tree_tokens, config.candidates, config.least_probability)
        case "lookahead":
            return Lookahead(config.draft_length, config.window, config.candidates)
        case "eagle":
            trained = load_eagle(config.head, target)
            readout, embeddings = Readout(target, trained.tokens), target.model.get_input_embeddings()
            tree = config.candidates, config.tree_tokens, config.least_probability
            return Eagle(trained, embeddings, readout, config.draft_length, config.stop, *tree)
        case "medusa":
            heads = load_medusa(config.head, target)
            tree = config.candidates, config.tree_tokens, config.least_probability
            return Medusa(heads, Readout(target, heads.tokens), config.draft_length, *tree)
        case "draft_model":
            draft = _draft_model(config, target)
            view, head = _narrowed_draft(draft, config, target)
            return DraftModel(view, draft.layers, config.draft_length, config.stop, head)
        case "cross_tokenizer":
            draft = _draft_model(config, target, same_tokenizer=False)
            assert target.tokenizer is not None
            assert draft.tokenizer is not None
            try:
                translation = Translation(target.tokenizer, draft.tokenizer)
            except UnalignedTokenizers as error:
                raise ConfigError(f"draft: {config.draft} cannot draft for {target.name}: {error}") from error
            view, head = _narrowed_draft(draft, config, draft)
            shared = {theirs for own, theirs in translation.shared if own < target.vocabulary}
            if head is not None and shared.isdisjoint(head.tokens.tolist()):  # nothing could be drawn
                raise ConfigError(f"draft_head: {config.draft_head} has no token that {target.name} has, too")
            layers, width = draft.layers, draft.vocabulary
            return CrossTokenizer(view, layers, width, translation, config.draft_length, config.stop, head)
        case "cascade":
            # Of what lossy rules accept the text tells nothing, so that nobody would know what a declined draft was worth.
            members = [build_drafter(member, target) for member in config.members]
            if config.verify_cost and config.lossless:
                return PricedCascade(members, config.verify_cost, config.draft_cost)
            return Cascade(members)
        case other:
            raise ConfigError(f"kind: {other!r} has no drafter")


def _narrowed_draft(draft: Target, config: SpeculativeConfig, owner: Target) -> tuple[PreTrainedModel, DraftHead | None]:
    """A view of a draft model, and the tokens that it was narrowed to."""
    view = twin(draft.model) if config.draft_head else decoding_view(draft.model)
    return view, _narrowed(view, draft.model, config, owner)


def _narrowed(view: PreTrainedModel, model: PreTrainedModel, config: SpeculativeConfig, owner: Target) -> DraftHead | None:
    """Narrow a view of a model to the tokens that a configuration names, if it does, which were chosen for their owner."""
    if not config.draft_head:
        return None
    head = DraftHead(model, load_draft_tokens(config.draft_head, owner), owner.vocabulary)
    head.narrow(view)
    return head


def _draft_model(config: SpeculativeConfig, target: Target, same_tokenizer: bool = True) -> Target:
    draft = load_draft(target, config.draft, same_tokenizer)
    try:
        check_rewind(draft.model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"draft: {error}") from error
    return draft
