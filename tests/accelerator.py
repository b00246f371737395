"""The device of the tests' models, and decoding with or without its static shapes."""

import functools
import os
from typing import Any
from unittest import mock

from layerskip.decoding import decode as loop
from layerskip.decoding.decode import DecodeResult
from layerskip.models.cache_pool import acquire_cache

DEVICE = os.environ.get("LAYERSKIP_TEST_DEVICE", "cpu")


def decode_static(*args: Any, static: bool = True, **options: Any) -> DecodeResult:
    """Decodes with captured passes, which a CPU recomputes in the static shapes of a GPU; or without them on any device."""
    with mock.patch.object(loop, "acquire_cache", functools.partial(acquire_cache, static_shapes=static)):
        return loop.decode(*args, **options)
