"""What does a model think of a text, before it says which token comes next? Hidden states, read while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Features:
    """Reads the outputs of some of a model's sub-modules during its passes.

    Args:
        modules: their names; where there are none, nothing is read.

    Attributes:
        parts: what each gave in the last pass, ``[B, n, H]``.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = tuple(modules)
        self.parts: tuple[Tensor, ...] = ()

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Read the passes of a model, or of a view of one, for as long as this lasts."""
        found: dict[str, Tensor] = {}

        def note(name: str) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                found[name] = output if isinstance(output, Tensor) else output[0]

            return hook

        handles = [model.get_submodule(name).register_forward_hook(note(name)) for name in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.parts = tuple(found[name] for name in self.modules)

    def read(self) -> Tensor:
        """``[n, F]``: what the last pass gave for each of its tokens, module beside module."""
        return torch.cat([part[0] for part in self.parts], dim=-1)


NOTHING = Features(())
