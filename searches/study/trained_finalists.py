"""What do finalists draft with? Bridges that are trained by gradient, from what a bridge_store has fitted in closed form.

Training lowers a loss on its own texts, which is no promise: what comes of it is judged beside empty skips on texts that it
has not seen, those that the calibration holds back from its fits as well.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from layerskip import SkipMask, SpeculativeConfig
from layerskip.device.memory import out_of_memory, release
from layerskip.files import digest
from layerskip.models.bridge import BridgeShape, save_bridges
from layerskip.texts.continuations import Continuation
from searches.app.checks import InputError
from searches.app.file_lock import exclusive
from searches.predict.scan_oracle import ScanOracle
from searches.space.bridge_spec import BridgeSpec
from searches.space.choices import DraftCost
from searches.study.leaderboard import LeaderboardEntry
from searches.tracking.tracker import Tracker
from searches.training.bridge_store import BridgeStore, about
from searches.training.bridge_training import BridgeLearner
from searches.training.learner import TrainingFile
from searches.training.training_texts import continuations_of
from searches.training.warm_start import Neighbours

_RECIPE = 2  # of training and judging; what was trained otherwise is trained anew
_STEPS = 10**6  # time ends training
_SAVED = 30.0  # seconds between savings
_TOKENS = 16384  # that training looks at where drafts are from the whole vocabulary: enough to learn by
_SETTINGS = ("learning_rate", "unroll", "texts_per_step", "calibration_bytes", "training_bytes")


class TrainedBridges:
    """Trains bridges of finalists, each once.

    Args:
        bridge_store: where closed forms, texts and settings come from, and where what is trained is kept.
        tracker: of the study, below whose run every training gets one; None tells nobody.
        draft_cost: what the members of a cascade take to draft; None, or nothing told, keeps what closed forms took.
    """

    def __init__(
        self,
        bridge_store: BridgeStore,
        tracker: Tracker | None = None,
        draft_cost: DraftCost | None = None,
    ) -> None:
        self._bridge_store, self._target, self._tracker, self._draft_cost = (
            bridge_store,
            bridge_store.target,
            tracker,
            draft_cost,
        )
        self._learning: dict[str, Any] = {name: getattr(bridge_store.settings, name) for name in _SETTINGS}
        self._learning |= {"max_seconds": bridge_store.settings.train_seconds, "steps": _STEPS}
        self._learning |= {"save_seconds": _SAVED, "seed": bridge_store.seed}
        self._grown = Neighbours(self._target)

    def finalists(self, leaderboard: Sequence[LeaderboardEntry], oracles: Sequence[ScanOracle]) -> list[LeaderboardEntry]:
        """Those that are bridged once more, with trained bridges, where these draft better than empty skips.

        Drafts that are right more often pay for longer ones, so how far each drafts is foretold once more, and need not be
        what was measured to be best with its closed form.

        Args:
            leaderboard: as a search ends.
            oracles: of all that masks were made up with.
        """
        found: dict[SpeculativeConfig, LeaderboardEntry] = {}
        for entry in leaderboard:
            if any(part.bridge for part in (entry.config, *entry.config.members)):
                config, reason = None, ""
                try:
                    config = self._whole(entry.config)
                except InputError as error:  # what was searched for so long shall be measured all the same
                    reason = str(error)
                except (MemoryError, RuntimeError) as error:
                    if not out_of_memory(error):
                        raise
                    reason = "out of memory"
                if reason:
                    release()
                    print(f"bridging: bridges of {entry.config.label()} stay as they were fitted: {reason}")
                if config is not None:
                    config = _suited(config, oracles) if config.bridge else config
                    found.setdefault(config, replace(entry, config=config))
        return list(found.values())

    def _whole(self, config: SpeculativeConfig) -> SpeculativeConfig | None:
        """As :meth:`of`, and the same of a cascade's members; None where no bridges changed."""
        if config.bridge:
            return self.of(config)
        members = tuple((self.of(member) if member.bridge else None) or member for member in config.members)
        if members == config.members:
            return None
        cost = () if self._draft_cost is None else self._draft_cost(members)
        return replace(config, members=members, draft_cost=cost or config.draft_cost)

    def of(self, config: SpeculativeConfig) -> SpeculativeConfig | None:
        """A bridged configuration with its bridges trained, from their closed form on, or from what was trained before of
        the nearest mask, where that loses less; None, said in a line, where drafts are then no better than with empty skips.
        """
        bridge_store = self._bridge_store
        mask = SkipMask.parse(config.mask, self._target.layers)
        bridge_spec = bridge_store.bridge_spec(config)
        width = bridge_spec.width or bridge_store.settings.train_width
        made = ("mlp", bridge_spec.rank, width) if width else (bridge_spec.bridge, bridge_spec.rank)
        shape = BridgeShape.of(self._target, mask, *made)
        identity = digest([_RECIPE, bridge_store.digest, self._learning, shape.to_dict(), bridge_spec.tokens])
        folder = bridge_store.folder / f"trained-{identity[:16]}"
        here = 0.0
        if not (folder / "head.json").exists():
            held = set(bridge_store.calibration.held)
            continuations = [
                continuation for continuation in continuations_of(bridge_store.texts) if continuation not in held
            ]
            if not continuations:
                print("bridge: too few texts to train on some and judge by others; closed forms stay as they are")
                return None
            with exclusive(folder):
                if not (folder / "head.json").exists():
                    here = self._train(folder, identity, shape, bridge_spec, continuations)
        found = about(folder)
        bridge_store.on_use(folder.name, found["seconds"], here)
        if not found["helps"]:
            worth = f"({found['bridged']:.2f}) than empty skips ({found['empty']:.2f})"
            print(f"bridge: {shape.kind} trained for {mask.format()} drafts no better {worth}; it is not used")
            return None
        self._grown.add(shape, folder)
        return replace(config, bridge=str(folder))

    def _train(
        self, folder: Path, identity: str, shape: BridgeShape, bridge_spec: BridgeSpec, continuations: list[Continuation]
    ) -> float:
        """Train, judge, and keep all of it; returns the seconds that this process spent."""
        bridge_store = self._bridge_store
        with contextlib.ExitStack() as stack:
            run = None
            if self._tracker is not None:
                run = self._tracker.nested(folder.name, identity, self._learning | shape.to_dict(), "training")
                stack.enter_context(run.closing())
            learner = BridgeLearner(
                OmegaConf.create(self._learning),
                shape,
                self._target,
                continuations,
                None,
                bridge_store.tokens(bridge_spec.tokens or _TOKENS),
                TrainingFile(folder / "training.pt", identity),
                lambda: bridge_store.calibration,
                bridge_store.memory,
                self._grown.nearest(shape),
            )
            try:
                learner.learn_all(run)
            except BaseException:
                bridge_store.on_use(folder.name, learner.kept, learner.kept - learner.before)
                raise
            start = time.monotonic()
            judged = [bridge_store.calibration.judge(learner.bridges.mask, bridges) for bridges in (None, learner.bridges)]
            empty, bridged = judged
            seconds = learner.seconds + time.monotonic() - start
            said = {
                "bridge": bridge_spec.bridge,
                "rank": bridge_spec.rank,
                "width": bridge_spec.width,
                "texts": bridge_store.digest,
            }
            said |= {"steps": learner.step, "seconds": seconds}
            said |= {"helps": bridged > empty, "empty": empty, "bridged": bridged}
            if run is not None:
                worth = {"agreement_empty": empty, "agreement_bridged": bridged, "training_seconds": seconds}
                run.log(run.run_id, worth | learner.begun_as, step=learner.step)
            save_bridges(folder, learner.bridges, self._target, said | self._learning, bridge_store.calibration.digest)
        return seconds - learner.before


def _suited(config: SpeculativeConfig, oracles: Sequence[ScanOracle]) -> SpeculativeConfig:
    """A configuration as it is best by one of the oracles; as it is where none foretells it, or memory does not suffice."""
    oracle = next((oracle for oracle in oracles if oracle.foretells(config)), None)
    try:
        return config if oracle is None else oracle.suited(config)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
    release()
    print(f"bridging: {config.label()} drafts as far as before its training: out of memory")
    return config
