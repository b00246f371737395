"""What do the configuration's leaves call that is not one call already?"""

from __future__ import annotations

import os

from layerskip import Target, TargetError, load_target


def load_local(
    path: str,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    pack_weights: bool | None = None,
) -> Target:
    """A target from a folder or a ``.gguf`` file, never from the hub.

    Raises:
        TargetError: there is no such folder or file, or it cannot be loaded.
    """
    if not os.path.isdir(path) and not os.path.isfile(path):
        raise TargetError(f"target.path: there is no folder or file {path}")
    return load_target(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code, pack_weights=pack_weights)
