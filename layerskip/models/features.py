"""Hidden states of a model, collected during its forward passes. EAGLE calls them features (arXiv 2401.15077)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Features:
    """A collector of the outputs of some of a model's sub-modules.

    Args:
        modules: dotted names of the sub-modules; empty to collect nothing.

    Attributes:
        parts: each module's output in the last pass, ``[B, n, H]``.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = tuple(modules)
        self.parts: tuple[Tensor, ...] = ()

    @contextlib.contextmanager
    def collect(self, model: nn.Module) -> Iterator[None]:
        """Collect from the passes of a model, or of a view of it, within the ``with`` block."""
        outputs: dict[str, Tensor] = {}

        def hook_for(name: str) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                outputs[name] = output if isinstance(output, Tensor) else output[0]

            return hook

        handles = [model.get_submodule(name).register_forward_hook(hook_for(name)) for name in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.parts = tuple(outputs[name] for name in self.modules)

    def read(self) -> Tensor:
        """Return the outputs of the last pass for each token, ``[n, F]``, concatenated over the modules."""
        return torch.cat([part[0] for part in self.parts], dim=-1)


NO_FEATURES = Features(())
