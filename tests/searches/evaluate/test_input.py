"""Every program refuses bad input by the field's name, before anything is loaded or written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.evaluate.calibration import calibrate
from searches.evaluate.exactness import exactness
from searches.evaluate.gpu import measure_gpu
from searches.evaluate.predictions import compare_predictions
from searches.evaluate.race import race_strategies
from searches.evaluate.scale import measure_scale

REFUSED = {
    calibrate: ("itself.prompts=4", "coverage.prompts=[12,x]", "planted.layers=2", "itself.max_winners=few", "seed=-1"),
    exactness: ("lengths=[]", "lengths=[0]", "thresholds=[1.5]", "shares=3", "count=none", "max_new_tokens=1"),
    measure_gpu: ("seconds=0", "seed=x"),
    compare_predictions: ("lengths=[a]", "masks=1", "max_error=-1"),
    race_strategies: ("strategies=[x]", "strategies=[ours]", "strategies=[draft_verify,swift]", "seeds=1", "max_share=5%"),
    measure_scale: ("only=[five]", "layers=1", "scenarios.one.kills=-1", "trial_prompts=x"),
}
CASES = [(program, override) for program, overrides in REFUSED.items() for override in overrides]


@pytest.mark.parametrize(("program", "override"), CASES, ids=[override for _, override in CASES])
def test_refusals_name_the_field(program: Callable[[DictConfig], None], override: str, tmp_path: Path) -> None:
    config = compose_config(program.__module__.rpartition(".")[2], [override, f"outputs={tmp_path}"])
    with pytest.raises(InputError, match=f"^{re.escape(override.partition('=')[0])}: "):
        program(config)
    assert not list(tmp_path.iterdir())
