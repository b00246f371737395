"""The device of the tests' models, and decoding with or without its static shapes."""

import functools
import os
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import pytest

    from layerskip.decoding.decode import DecodeResult

DEVICE = os.environ.get("LAYERSKIP_TEST_DEVICE", "cpu")


def compile_anywhere(patch: "pytest.MonkeyPatch") -> None:
    """Captures passes and compiles their layers, also without a GPU."""
    from layerskip.models.cache_pool import acquire_cache

    patch.setattr("layerskip.models.compiled_layers._on_gpu", lambda tensor: True)
    patch.setattr("layerskip.decoding.decode.acquire_cache", functools.partial(acquire_cache, static_shapes=True))


def decode_static(*args: Any, static: bool = True, **options: Any) -> "DecodeResult":
    """Decodes with captured passes, which a CPU recomputes in the static shapes of a GPU; or without them on any device."""
    from layerskip.decoding import decode as loop  # not by the process that starts the workers
    from layerskip.models.cache_pool import acquire_cache

    with mock.patch.object(loop, "acquire_cache", functools.partial(acquire_cache, static_shapes=static)):
        return loop.decode(*args, **options)
