"""Trials of hand-written GPU kernels: each is compared with torch's own operator before it is used."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Hashable

from torch import Tensor

from layerskip.device.failures import first_line
from layerskip.device.tolerance import nearly_equal
from layerskip.device.transfer import waiting

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether the kernels' compiler is installed; torch's builds for CUDA bring it along."""


def passes_trial(name: str, kind: Hashable, run: Callable[[], tuple[Tensor, Tensor]]) -> bool:
    """Return whether a kernel works. Each kind of input is tried when it first occurs in a process; a failure is logged.

    Args:
        name: the kernel, for the log.
        kind: what the trial depends on.
        run: returns the kernel's output and the expected one.
    """
    if (name, kind) not in _passed:
        try:
            with waiting("default"):
                reason = "" if nearly_equal(*run()) else "it gives other results"
        except Exception as error:  # compilers raise errors of many kinds
            reason = first_line(error)
            _log.debug("the kernel for %s fails", name, exc_info=error)
        if reason:
            _log.warning("the kernel for %s cannot be used (%s): %s", name, kind, reason)
        _passed[name, kind] = not reason
    return _passed[name, kind]


_passed: dict[tuple[str, Hashable], bool] = {}
_log = logging.getLogger(__name__)
