"""Every program refuses bad input by the field's name, before anything is loaded or written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.evaluate.calibration import calibrate
from searches.evaluate.exactness import exactness
from searches.evaluate.gpu import measure_gpu
from searches.evaluate.long_context import measure_long_contexts
from searches.evaluate.predictions import compare_predictions
from searches.evaluate.race import race_strategies
from searches.evaluate.scale import measure_scale

PROGRAMS = {
    "calibration": calibrate,
    "exactness": exactness,
    "gpu": measure_gpu,
    "long_context": measure_long_contexts,
    "predictions": compare_predictions,
    "race": race_strategies,
    "scale": measure_scale,
}
REFUSED = {
    "calibration": (
        *("itself.comparisons=0", "itself.prompts=4", "coverage.prompts=[12,x]", "planted.layers=2", "planted.max_lost=2"),
        *("itself.max_winners=few", "coverage.minimum=-1", "seed=-1"),
    ),
    "exactness": ("lengths=[]", "lengths=[0]", "thresholds=[1.5]", "shares=3", "masks=0", "count=none", "max_new_tokens=1"),
    "gpu": ("parts=[speed]", "tokens=[0]", "seconds.plain=0"),
    "long_context": ("predicted=2048", "predicted=0", "lengths=[]", "repeats=0", "seed=-1", "max_error=x"),
    "predictions": ("lengths=[]", "lengths=[a]", "masks=0", "seed=-1", "max_error=x"),
    "race": (
        *("strategies=[x]", "strategies=[]", "strategies=[ours]", "strategies=[draft_verify,swift]", "seeds=1", "seeds=[]"),
        *("seconds=x", "max_share=5%"),
    ),
    "scale": ("only=[five]", "layers=1", "scenarios.one.workers=0", "scenarios.one.kills=-1", "trial_prompts=x"),
}
OTHER_FIELDS = [("race", "seeds=[-1]", "seed"), ("scale", "only=[four]", "scenarios.four.like")]


@pytest.mark.parametrize(
    ("program", "override", "field"),
    [*((name, each, each.partition("=")[0]) for name, some in REFUSED.items() for each in some), *OTHER_FIELDS],
)
def test_refusals_name_the_field(program: str, override: str, field: str, tmp_path: Path) -> None:
    config = compose_config(program, [override, f"outputs={tmp_path}"])
    with pytest.raises(InputError, match=f"^{re.escape(field)}: "):
        PROGRAMS[program](config)
    assert not list(tmp_path.iterdir())
