"""What do finalists draft with? Bridges that are trained by gradient, from what a shelf has fitted in closed form.

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
from layerskip.bridge import BridgeShape, save_bridges
from layerskip.files import digest
from layerskip.memory import out_of_memory, release
from layerskip.passages import Passage

from .application import InputError
from .bridging import BridgeLearner
from .learner import TrainingFile
from .makeup import Makeup
from .neighbours import Neighbours
from .pricing import DraftCost
from .scan_oracle import ScanOracle
from .shelf import Shelf, about
from .standings import Standing
from .tracking import Tracker
from .turns import turn
from .written import passages_of

_RECIPE = 2  # of training and judging; what was trained otherwise is trained anew
_STEPS = 10**6  # time ends training
_SAVED = 30.0  # seconds between savings
_TOKENS = 16384  # that training looks at where drafts are from the whole vocabulary: enough to learn by
_SETTINGS = ("learning_rate", "unroll", "texts_per_step", "calibration_bytes", "training_bytes")


class TrainedBridges:
    """Trains bridges of finalists, each once.

    Args:
        shelf: where closed forms, texts and settings come from, and where what is trained is kept.
        tracker: of the study, below whose run every training gets one; None tells nobody.
        draft_cost: what the members of a cascade take to draft; None, or nothing told, keeps what closed forms took.
    """

    def __init__(
        self,
        shelf: Shelf,
        tracker: Tracker | None = None,
        draft_cost: DraftCost | None = None,
    ) -> None:
        self._shelf, self._target, self._tracker, self._draft_cost = shelf, shelf.target, tracker, draft_cost
        self._learning: dict[str, Any] = {name: getattr(shelf.settings, name) for name in _SETTINGS}
        self._learning |= {"max_seconds": shelf.settings.train_seconds, "steps": _STEPS}
        self._learning |= {"save_seconds": _SAVED, "seed": shelf.seed}
        self._grown = Neighbours(self._target)

    def finalists(self, standings: Sequence[Standing], oracles: Sequence[ScanOracle]) -> list[Standing]:
        """Those that are bridged once more, with trained bridges, where these draft better than empty skips.

        Drafts that are right more often pay for longer ones, so how far each drafts is foretold once more, and need not be
        what was measured to be best with its closed form.

        Args:
            standings: as a search ends.
            oracles: of all that masks were made up with.
        """
        found: dict[SpeculativeConfig, Standing] = {}
        for standing in standings:
            if any(part.bridge for part in (standing.config, *standing.config.members)):
                config, reason = None, ""
                try:
                    config = self._whole(standing.config)
                except InputError as error:  # what was searched for so long shall be measured all the same
                    reason = str(error)
                except (MemoryError, RuntimeError) as error:
                    if not out_of_memory(error):
                        raise
                    reason = "out of memory"
                if reason:
                    release()
                    print(f"bridging: bridges of {standing.config.label()} stay as they were fitted: {reason}")
                if config is not None:
                    config = _suited(config, oracles) if config.bridge else config
                    found.setdefault(config, replace(standing, config=config))
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
        shelf = self._shelf
        mask = SkipMask.parse(config.mask, self._target.layers)
        makeup = shelf.makeup(config)
        width = makeup.width or shelf.settings.train_width
        made = ("mlp", makeup.rank, width) if width else (makeup.bridge, makeup.rank)
        shape = BridgeShape.of(self._target, mask, *made)
        identity = digest([_RECIPE, shelf.digest, self._learning, shape.to_dict(), makeup.tokens])
        folder = shelf.folder / f"trained-{identity[:16]}"
        here = 0.0
        if not (folder / "head.json").exists():
            held = set(shelf.calibration.held)
            passages = [passage for passage in passages_of(shelf.texts) if passage not in held]
            if not passages:
                print("bridge: too few texts to train on some and judge by others; closed forms stay as they are")
                return None
            with turn(folder):
                if not (folder / "head.json").exists():
                    here = self._train(folder, identity, shape, makeup, passages)
        found = about(folder)
        shelf.on_use(folder.name, found["seconds"], here)
        if not found["helps"]:
            worth = f"({found['bridged']:.2f}) than empty skips ({found['empty']:.2f})"
            print(f"bridge: {shape.kind} trained for {mask.format()} drafts no better {worth}; it is not used")
            return None
        self._grown.add(shape, folder)
        return replace(config, bridge=str(folder))

    def _train(self, folder: Path, identity: str, shape: BridgeShape, makeup: Makeup, passages: list[Passage]) -> float:
        """Train, judge, and keep all of it; returns the seconds that this process spent."""
        shelf = self._shelf
        with contextlib.ExitStack() as stack:
            run = None
            if self._tracker is not None:
                run = self._tracker.nested(folder.name, identity, self._learning | shape.to_dict(), "training")
                stack.enter_context(run.closing())
            learner = BridgeLearner(
                OmegaConf.create(self._learning),
                shape,
                self._target,
                passages,
                None,
                shelf.tokens(makeup.tokens or _TOKENS),
                TrainingFile(folder / "training.pt", identity),
                lambda: shelf.calibration,
                shelf.memory,
                self._grown.nearest(shape),
            )
            try:
                learner.learn_all(run)
            except BaseException:
                shelf.on_use(folder.name, learner.kept, learner.kept - learner.before)
                raise
            start = time.monotonic()
            judged = [shelf.calibration.judge(learner.bridges.mask, bridges) for bridges in (None, learner.bridges)]
            empty, bridged = judged
            seconds = learner.seconds + time.monotonic() - start
            said = {"bridge": makeup.bridge, "rank": makeup.rank, "width": makeup.width, "texts": shelf.digest}
            said |= {"steps": learner.step, "seconds": seconds}
            said |= {"helps": bridged > empty, "empty": empty, "bridged": bridged}
            if run is not None:
                worth = {"agreement_empty": empty, "agreement_bridged": bridged, "training_seconds": seconds}
                run.log(run.run_id, worth | learner.begun_as, step=learner.step)
            save_bridges(folder, learner.bridges, self._target, said | self._learning, shelf.calibration.digest)
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
