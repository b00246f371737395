"""Who foretells a target best? Trains heads that draft from its hidden states, on texts that it writes itself.

``python -m searches.train drafter=eagle`` (or ``medusa``) lets the target write prompts and answers, reads its hidden states
into a file, trains, and says how often drafts would be accepted on held-out prompts. Everything is kept as it is made, and
the same command goes on; what it writes is a head that ``kind: eagle`` drafts with.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from layerskip import PromptSet, Sampling, Target
from layerskip.clock import now
from layerskip.eagle import EagleHead, EagleShape, read_modules
from layerskip.environment import environment
from layerskip.feature_store import FeatureStore, Thought, read_features
from layerskip.files import digest
from layerskip.heads import save_head
from layerskip.medusa import MedusaHeads, MedusaShape
from layerskip.own_texts import OwnText, write_texts
from layerskip.passages import continue_prompts
from layerskip.readout import Readout, choose_tokens
from layerskip.training import Batch, agreements, fit_linear, foretell, loss_of, stored_modules

from .application import InputError, run
from .kept import Kept
from .objective import check_seed
from .tracking import Tracker

_KINDS = ("eagle", "medusa")
_NUMBERS = ("tokens", "max_new_tokens", "batch", "feature_bytes", "steps", "texts_per_step", "unroll", "held_out_tokens")
_RECIPE = 2  # of what follows and of layerskip.training; a training goes on only as it began
_WARMING = 0.03  # of the steps, during which the learning rate rises
_ALONE = 0.6  # of the training, in which EAGLE learns the next token alone: a third of the time, and it decides the rest
_CLIP = 1.0
_LOSSES = 50  # steps over which the loss is averaged
_TEXTS = ("tokens", "max_new_tokens", "batch", "seed")
_LEARNING = (
    "steps",
    "max_seconds",
    "texts_per_step",
    "learning_rate",
    "unroll",
    "three_layers",
    "vocabulary",
    "feature_bytes",
)


def train(config: DictConfig) -> Path:
    """Train a head; see ``conf/train.yaml``."""
    _check(config)
    kind, sampling = str(config.drafter.kind), instantiate(config.sampling)
    held_out: PromptSet = instantiate(config.prompts).split()[1]
    target: Target = instantiate(config.target)
    outputs = Path(config.outputs)
    written = {"target": target.digest, "sampling": sampling.to_dict(), **{name: config[name] for name in _TEXTS}}
    three_layers = kind == "eagle" and bool(config.three_layers)
    modules = stored_modules(read_modules(target, three_layers), target.model.base_model_prefix)
    features = outputs / "features" / digest([written, modules, config.feature_bytes])[:16]
    learnt = {"kind": kind, "recipe": _RECIPE, "texts": digest(written), **{name: config[name] for name in _LEARNING}}
    folder = Path(config.head or outputs / f"{kind}-{digest(learnt)[:8]}")
    tracker = Tracker(config.tracking.uri, outputs, config.tracking.experiment)
    tracker.open_study(folder.name, digest(learnt), learnt, environment(target.device), role="training")
    with tracker.closing():
        texts = _write(config, target, sampling, outputs / "texts" / f"{digest(written)[:16]}.jsonl")
        store = FeatureStore(features, modules)
        with tqdm(total=len(texts), unit="text", desc="hidden states", disable=None) as bar:
            store.fill(target, texts, int(config.feature_bytes), bar.update)
        if len(store) < len(texts):
            print(f"feature_bytes: {config.feature_bytes:,} hold {len(store)} of {len(texts)} texts")
        if not len(store):
            raise InputError(f"feature_bytes: {config.feature_bytes} hold not even one text")
        judges = _held_out(config, target, held_out, modules, outputs)
        head = _head(config, kind, target, texts)
        learner = _Learner(config, head, target, store, folder / "training.pt", digest([learnt, head.shape.to_dict()]))
        _learn(config, learner, judges, tracker)
        training: dict[str, Any] = {
            "data": digest([list(text.tokens) for text in texts]),
            "positions": store.positions,
        } | learnt
        accepted = learner.judge(judges)
        training |= {"steps_done": learner.step, "seconds": learner.seconds, "held_out": accepted}
        weights = head.weights() if isinstance(head, EagleHead) else dict(head.state_dict())
        save_head(folder, kind, head.shape.to_dict(), weights, target, training)
        tracker.log_file(folder / "head.json")
    shown = ", ".join(f"{rate:.2f}" for rate in accepted)
    print(f"accepted on held-out prompts, token by token: {shown}")
    print(f"wrote {folder}; decode with kind={kind} head={folder}")
    return folder


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
    if config.drafter.get("kind") not in _KINDS:
        raise InputError(f"drafter: {config.drafter.get('kind')!r} is not trained; {' and '.join(_KINDS)} are")
    for name in _NUMBERS:
        if isinstance(config[name], bool) or not isinstance(config[name], int) or config[name] < 1:
            raise InputError(f"{name}: {config[name]!r} is not a whole number of at least 1")
    for name in ("vocabulary", "max_seconds", "save_seconds"):
        value = config[name]
        numbers = int if name == "vocabulary" else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers) or value <= 0):
            raise InputError(f"{name}: {value!r} is not a number above 0")
    if not isinstance(config.three_layers, bool):
        raise InputError(f"three_layers: {config.three_layers!r} is neither true nor false")
    if not isinstance(config.learning_rate, float) or not 0 < config.learning_rate < 1:
        raise InputError(f"learning_rate: {config.learning_rate!r} is not a number between 0 and 1")


def _write(config: DictConfig, target: Target, sampling: Sampling, file: Path) -> list[OwnText]:
    """The target's own texts, those that are kept and as many more as are asked for."""
    kept = Kept(file)
    texts = [OwnText(tuple(kept[name][0]), kept[name][1]) for name in kept]
    left = int(config.tokens) - sum(len(text.tokens) - text.begin for text in texts)
    with tqdm(
        total=int(config.tokens), initial=int(config.tokens) - max(0, left), unit="token", desc="texts", disable=None
    ) as bar:
        # Draws of their own for what was missing after a kill, so that no text is drawn twice.
        source = write_texts(
            target, sampling, int(config.max_new_tokens), int(config.batch), config.seed + 1000 * len(texts)
        )
        while left > 0:
            text = next(source)
            kept.add(str(len(texts)), [list(text.tokens), text.begin])
            texts.append(text)
            left -= len(text.tokens) - text.begin
            bar.update(len(text.tokens) - text.begin)
    return texts


def _held_out(
    config: DictConfig, target: Target, prompts: PromptSet, modules: tuple[str, ...], outputs: Path
) -> list[Thought]:
    """What the target says to prompts that nothing is learnt from."""
    with tqdm(total=len(prompts), unit="prompt", desc="held-out", disable=None) as bar:
        passages = continue_prompts(
            target, prompts, Sampling(), int(config.held_out_tokens), config.seed, outputs / "continuations", bar.update
        )
    found = []
    for passage in passages:
        tokens = (*passage.prompt, *passage.tokens)
        read = read_features(target, tokens, modules).to(torch.bfloat16)
        found.append(Thought(torch.tensor(tokens), read.cpu(), len(passage.prompt)))
    return found


def _head(config: DictConfig, kind: str, target: Target, texts: list[OwnText]) -> EagleHead | MedusaHeads:
    tokens: Tensor | None = None
    if config.vocabulary is not None and config.vocabulary < target.vocabulary:
        said = torch.tensor([token for text in texts for token in text.tokens[text.begin :]])
        counts = torch.bincount(said, minlength=target.vocabulary)
        tokens = choose_tokens(counts, int(config.vocabulary), sorted(target.eos_ids))
    size = None if tokens is None else tokens.shape[0]
    torch.manual_seed(config.seed)
    if kind == "eagle":
        return EagleHead(EagleShape.of(target, bool(config.three_layers), size), tokens)
    width = int(target.model.config.get_text_config(decoder=True).hidden_size)
    return MedusaHeads(MedusaShape(width, int(config.unroll), read_modules(target), size), tokens)


class _Learner:
    """A head in training; what it has come to lies in a file."""

    def __init__(
        self,
        config: DictConfig,
        head: EagleHead | MedusaHeads,
        target: Target,
        store: FeatureStore,
        file: Path,
        identity: str,
    ) -> None:
        self.config, self.store, self.file, self.identity = config, store, file, identity
        self.head = head.to(target.device).float().train()
        self.embeddings = target.model.get_input_embeddings()
        self.optimiser = torch.optim.AdamW(self.head.parameters(), lr=config.learning_rate, weight_decay=0.01)
        self.step, self.seconds = 0, 0.0
        self._device, self._fast = target.device.type, target.dtype == "bfloat16"
        if file.exists():
            state: dict[str, Any] = torch.load(file, weights_only=True, map_location=target.device)
            if state.get("identity") != identity:
                raise InputError(f"head: {file.parent} holds another training; name another folder")
            self.head.load_state_dict(state["head"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.step, self.seconds = state["step"], state["seconds"]
        elif isinstance(head, EagleHead):
            start = time.monotonic()
            fit_linear(head, self.embeddings, (store[place] for place in range(len(store))))
            self.seconds = time.monotonic() - start
        self.readout = Readout(target, self.head.tokens)

    @property
    def progress(self) -> float:
        """From 0 to 1: how much of the steps, or of the time, is done."""
        most = self.config.max_seconds
        return float(max(self.step / self.config.steps, self.seconds / most if most else 0.0))

    def learn(self) -> float:
        """One step; returns its loss."""
        start = now(self.readout.weight.device)
        rate = (
            min(1.0, (self.step + 1) / max(1.0, _WARMING * self.config.steps)) * (1 + math.cos(math.pi * self.progress)) / 2
        )
        for group in self.optimiser.param_groups:
            group["lr"] = self.config.learning_rate * rate
        batch = Batch.of([self.store[place] for place in self._places()], self.head)
        alone = isinstance(self.head, EagleHead) and self.progress < _ALONE
        with torch.autocast(self._device, torch.bfloat16, enabled=self._fast):
            found = foretell(self.head, self.embeddings, self.readout, batch, 1 if alone else self.config.unroll)
        loss = loss_of(found)
        if loss.requires_grad:
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), _CLIP)
            self.optimiser.step()
        found_loss = float(loss.detach())
        self.step += 1
        self.seconds += now(self.readout.weight.device) - start
        return found_loss

    def _places(self) -> list[int]:
        """Texts of this step: of all in a random order that changes every time they were gone through, the next ones."""
        size, each = len(self.store), min(self.config.texts_per_step, len(self.store))
        turns = max(1, size // each)
        generator = torch.Generator().manual_seed(self.config.seed + 1 + self.step // turns)
        order = torch.randperm(size, generator=generator).tolist()
        first = self.step % turns * each
        return order[first : first + each]

    @torch.no_grad()
    def judge(self, texts: list[Thought]) -> list[float]:
        """For each further token: how often a draft that was right so far is right there."""
        self.head.eval()
        counts = [(0, 0)] * int(self.config.unroll)
        for text in texts:
            batch = Batch.of([text], self.head)
            found = foretell(self.head, self.embeddings, self.readout, batch, int(self.config.unroll))
            tried = agreements(found, self.readout.tokens)
            counts = [(a + c, b + d) for (a, b), (c, d) in zip(counts, tried or [(0, 0)] * len(counts), strict=True)]
        self.head.train()
        return [right / tried if tried else 0.0 for tried, right in counts]

    def save(self) -> None:
        """Keep everything, whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        state = {"head": self.head.state_dict(), "optimiser": self.optimiser.state_dict()}
        torch.save(state | {"step": self.step, "seconds": self.seconds, "identity": self.identity}, partial)
        partial.replace(self.file)


def _learn(config: DictConfig, learner: _Learner, judges: list[Thought], tracker: Tracker) -> None:
    """Train to the end, keeping and judging what it has come to now and then."""
    kept = time.monotonic()
    losses: list[float] = []
    with tqdm(total=int(config.steps), initial=learner.step, unit="step", desc="training", disable=None) as bar:
        while learner.progress < 1.0:
            losses = [*losses[-_LOSSES + 1 :], learner.learn()]
            bar.update()
            bar.set_postfix_str(f"loss {sum(losses) / len(losses):.3f}")
            if time.monotonic() - kept >= config.save_seconds or learner.progress >= 1.0:
                learner.save()
                rates = learner.judge(judges)
                found = {f"held_out_acceptance_at_{place + 1:02d}": rate for place, rate in enumerate(rates)}
                tracker.log(tracker.run_id, found | {"loss": sum(losses) / len(losses)}, step=learner.step)
                kept = time.monotonic()


if __name__ == "__main__":
    run("train", train)
