"""What one process has compiled, the next one takes from the compiler's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exhaustive import EXHAUSTIVE

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from layerskip.kernels.product_fusion import ProductFusion
if sys.argv[1:]:
    ProductFusion.uuid = lambda self: sys.argv[1]
from layerskip.models import compiled_layers
compiled_layers._on_gpu = lambda tensor: True  # the options of the compiler are those of a GPU
from tests.models.test_compiled_layers import _caches, _compiled_passes, _model
from tests.models.passes import tokens_of
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
import torch
from torch._dynamo.utils import counters

model = _model("llama")
view = decoding_view(model)
with torch.inference_mode():
    cache, _ = _caches(model, view, 12)
    logits = forward(view, tokens_of(20)[12:16], cache, last=4)
assert _compiled_passes(cache) == [True]
found = dict(counters["inductor"]) | dict(counters["aot_autograd"])
print(json.dumps({name: count for name, count in found.items() if "cache" in name} | {"logits": logits.tolist()}))
"""


def _run(folder: Path, *arguments: str) -> dict[str, object]:
    """Return what a new process reads from the caches in a folder and compiles, and its logits."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not EXHAUSTIVE, reason="three processes compile; run by make lossless")
def test_compiled_layers_are_kept_for_the_next_process(tmp_path: Path) -> None:
    """Unless the pass that rewrites them has changed."""
    first, second, changed = _run(tmp_path), _run(tmp_path), _run(tmp_path, "another")
    logits = [found.pop("logits") for found in (first, second, changed)]
    assert logits[0] == logits[1] == logits[2]
    assert first == changed == {f"{kind}_cache_miss": 1 for kind in ("fxgraph", "autograd")} | {"autograd_cache_saved": 1}
    assert second == {"fxgraph_cache_hit": 1, "autograd_cache_hit": 1}
