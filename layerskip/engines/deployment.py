"""What an inference engine is asked to run: an export's target, configuration and sampling, with the files that it needs.

:mod:`layerskip.engines.registry` turns a :class:`Deployment` into the command or call that starts one engine with it, or
raises :class:`Unsupported` with the reason. It is written from the engines' documentation, and runs no engine.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerskip.config import SpeculativeConfig, methods
from layerskip.decoding.sampling import Sampling
from layerskip.draft_plan import DraftPlan, PlanError
from layerskip.heads.folders import eagle_method, is_published, why_not_portable
from layerskip.models.loading import WHEELS

Launch = dict[str, Any]
"""How an engine is started with a configuration. Empty fields mean the same as missing ones:

- ``method``: the engine's name for its way of drafting.
- ``prepare``: commands to run before, once.
- ``command``: the words of the command line that starts a server; or ``call``: Python statements that load the engine and
  generate a text from ``prompt``.
- ``arguments``: the values that set up drafting, as they are in the command or the call.
- ``request``: the sampling parameters of every request, under the engine's names.
- ``differs``: what the engine drafts otherwise than the configuration. The output is the target's own in any case.
"""


WAYS = ("none", "prompt_lookup", "suffix", "draft_model", "cross_tokenizer", "eagle", "eagle3")
"""How engines draft: ``draft_model`` also with the whole layers that a plan keeps, ``suffix`` in place of retrieval."""


class Unsupported(ValueError):
    """An engine cannot run a configuration. The message is the reason and begins with a field."""


@dataclass(frozen=True)
class Deployment:
    """An export as the engines see it. Its commands run in the folder from which ``file`` is found."""

    target: Mapping[str, Any]  # the export's fields of the target
    config: SpeculativeConfig  # with folders that can be found from here
    sampling: Sampling = field(default_factory=Sampling)
    file: Path = Path()  # of the export
    environment: Mapping[str, Any] = field(default_factory=dict)  # where it was measured, as the export states
    prepare: list[list[str]] = field(default_factory=list)  # takes the commands that write what the engine loads

    @property
    def revision(self) -> list[str]:
        """The words that select the target's revision, if it has one."""
        revision = self.target.get("revision")
        return [] if revision is None else ["--revision", str(revision)]

    @property
    def dtype(self) -> str:
        """The data type of the target, ``float32``, ``bfloat16`` or ``float16``."""
        return str(self.target["dtype"])

    @property
    def schedule(self) -> Sequence[Sequence[int]]:
        """The draft lengths by number of requests that were measured, as ``[[first, last, length], ...]``; often none."""
        measured = self.environment.get("backend")
        return measured.get("schedule", ()) if isinstance(measured, Mapping) else ()

    def model(self, hub: bool = True) -> str:
        """Return the target's hub id or folder; a GGUF file or the model of a wheel is written as a folder before.

        Without ``hub`` the engine takes no hub ids, so that their models are written, too.
        """
        return self._found("model", str(self.target["name"]), hub)

    def draft(self, engine: str, hub: bool = True) -> str:
        """Return the hub id or folder of what drafts: a model, kept layers of the target, or a head."""
        head = self.config.head
        if head and is_published(Path(head)):
            return head
        is_own = bool(head) or self.config.method == "quantized"  # each engine has its layout
        return self._found("draft", self.config.draft_model, hub, [f"engine={engine}"] if is_own else [])

    @property
    def _plan(self) -> DraftPlan:
        """The plan of a self-draft; of another draft, that which reads everything as it is stored."""
        return DraftPlan.parse(self.config.plan, int(self.target["layers"]))

    def draft_bits(self, engine: str) -> int:
        """Return the bits at which an engine reads all layers of a draft; 0 as they are stored.

        Raises:
            Unsupported: they differ between sub-layers.
        """
        plan = self._plan
        skips = (*plan.attention, *plan.mlp)
        kept = {bits for bits, skipped in zip(plan.sublayer_bits, skips, strict=True) if not skipped}
        if len(kept) > 1:
            raise Unsupported(f"config.weights: {engine} reads all layers of a draft at the same bits")
        return kept.pop()

    def way(self, engine: str = "", ways: Container[str] = WAYS) -> str:
        """Return how a configuration drafts, as one of :data:`WAYS`.

        Raises:
            Unsupported: no engine drafts so, or ``engine``, which has only some ``ways``, does not.
        """
        config = self.config
        if self.target.get("quantization") is not None:
            raise Unsupported("target.quantization: weights that are quantised on loading are no model of the engine")
        method = methods()[config.method]
        way = method.engine_method
        if not way or config.datastore:
            raise Unsupported(f"config.method: {config.method}: {method.no_engine}")
        if method.plan_field:
            _check_kept_layers(config.plan, int(self.target["layers"]))
        if "head" in method:
            if (reason := why_not_portable(Path(config.head))) is not None:
                raise Unsupported(f"config.head: {reason}")
            way = eagle_method(Path(config.head))
        if way not in ways:
            raise Unsupported(f"config.method: {config.method}: {engine} has no such drafter")
        return way

    def check_draft_bits(self, engine: str, in_float32: Container[int] = ()) -> None:
        """Raise :class:`Unsupported` if an engine has no kernels for the weights of a draft in the target's data type.

        ``in_float32`` are the bits for which it has some in float32.
        """
        bits = set(self._plan.sublayer_bits) - {0}
        if self.dtype == "float32" and (missing := [size for size in sorted(bits) if size not in in_float32]):
            raise Unsupported(
                f"config.weights: {engine} multiplies weights of {missing[0]} bits in bfloat16 and float16 only"
            )

    def left_out(
        self,
        stops: bool = False,
        trees: bool = False,
        match: str = "",
        any_size: bool = False,
        rounds: bool = False,
        scheduled: bool = False,
    ) -> list[str]:
        """Return what an engine that drafts constant chains does otherwise than the configuration.

        Args:
            stops: whether the engine can stop below a constant confidence.
            trees: whether it drafts trees.
            match: which match its lookup copies from, if that is not configured: ``first`` or ``last``.
            any_size: whether its lookup has no smallest n-gram.
            rounds: whether it rounds the weights of a draft itself.
            scheduled: whether its draft length follows the number of requests.
        """
        config, differs = self.config, list[str]()
        if self.schedule and not scheduled:
            spans = "; ".join(f"{first} to {last} requests: {length}" for first, last, length in self.schedule)
            differs.append(f"config.num_speculative_tokens: is the same for any number of requests; measured best: {spans}")
        if config.stop.method == "adaptive" or (config.stop.method == "threshold" and not stops):
            differs.append(f"config.stop: the {config.stop.method} rule is left out")
        if config.method == "layer_skip":
            differs.append("config.mask: the kept layers are a model with a cache of its own, which reads the prompt, too")
        if config.method == "quantized":
            differs.append("config.weights: the draft is a model with a cache of its own, which reads the prompt, too")
            if rounds:
                differs.append("config.weights: the engine rounds the weights, also those of the output layer, in its way")
            else:
                differs.append("config.weights: the output layer is read as it is stored")
        if config.draft_window:
            differs.append("config.draft_window: the draft attends to the whole context")
        if config.siblings:
            differs.append("config.siblings: a chain is drafted in place of a tree")
        if config.method == "eagle" and config.top_k > 1 and not trees:
            differs.append("config.tree_tokens: a chain is drafted in place of a tree")
        if config.method == "prompt_lookup":
            differs.append("config.num_speculative_tokens: drafts end with the text; copied tokens are not copied again")
            if match not in ("", config.match):
                differs.append(f"config.match: drafts are copied from the {match} match")
            if any_size and config.prompt_lookup_min > 1:
                differs.append("config.prompt_lookup_min: shorter matches count, too")
        return differs

    def beside(self, part: str) -> str:
        """Return the name of a file or folder beside the export."""
        return str(self.file.with_name(f"{self.file.stem}.{part}"))

    def _found(self, part: str, name: str, hub: bool, more: Sequence[str] = ()) -> str:
        if name and name not in WHEELS and not name.endswith(".gguf") and (hub or Path(name).is_dir()):
            return name
        folder = self.beside(part)
        self.prepare.append(["python", "-m", "searches.export", str(self.file), f"{part}={folder}", *more])
        return folder


def request_fields(sampling: Sampling, unlimited_k: int = 0) -> dict[str, Any]:
    """Return the sampling parameters of a request; ``unlimited_k`` is the engine's value of ``top_k`` for all tokens."""
    fields: dict[str, Any] = {"temperature": sampling.temperature, "repetition_penalty": sampling.repetition_penalty}
    if not sampling.greedy:
        fields |= {"top_k": int(sampling.top_k) or unlimited_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return fields


def hugging_face_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling parameters under the names of a Hugging Face generation configuration."""
    fields = request_fields(sampling)
    if sampling.greedy:
        del fields["temperature"]
    return {"do_sample": not sampling.greedy} | fields


def _check_kept_layers(text: str, layers: int) -> None:
    """Check that a self-draft is a model of its own: the target without some whole layers."""
    try:
        mask = DraftPlan.parse(text, layers)
    except PlanError as error:
        raise Unsupported(f"config.{error}") from None
    field = "weights" if mask.formats else "mask"
    if mask.formats and not any(mask.sublayer_bits):
        raise Unsupported("config.weights: no engine reads the output layer alone at fewer bits")
    if not mask.is_whole_layers or not (any(mask.attention) or mask.formats):
        raise Unsupported(f"config.{field}: no engine skips single sub-layers; whole layers left out are a draft model")
    if all(mask.attention):
        raise Unsupported(f"config.{field}: skips every layer, so no layer is left for a draft model")
