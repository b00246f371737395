"""The back end of a program: made of its configuration, or of what an export says it was measured with."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from layerskip import Export, Target
from searches.app.checks import InputError
from searches.app.composition import CONF, fill_defaults
from searches.backends.backend import Backend, BackendError, Workload
from searches.backends.layerskip import LayerskipBackend
from searches.backends.server import ServerBackend
from searches.space.search_space import SearchSpace

_OWN = LayerskipBackend.name


def make_backend(config: DictConfig, target: Target) -> tuple[Backend, Workload]:
    """Return the configured back end and workload; back ends without one decode one request at a time."""
    workload = Workload() if config.get("workload") is None else instantiate(config.workload)
    return backend_alone(config, target), workload


def backend_alone(config: DictConfig, target: Target) -> Backend:
    """Return the configured back end."""
    fields: Any = OmegaConf.to_container(config.backend, resolve=True)
    # Not instantiate(), which copies its arguments, the model included.
    backend: Backend = get_object(fields.pop("_target_"))(target, **fields)
    return backend


def exported_backend(config: DictConfig, export: Export, target: Target) -> tuple[Backend, Workload]:
    """Return the back end and the workload that an export was measured with.

    The export gives names and a schedule alone. Settings are those of the configuration, since a back end may start programs
    that they name, and files of others must not choose these. An export of another engine may be measured on a server that
    runs it.
    """
    stored = export.environment.get("backend", {})
    load = stored.get("workload", {})
    name, workload = str(stored.get("name", _OWN)), Workload(load.get("concurrency", 1), load.get("goal", "decoding"))
    if config.get("backend") is None:
        file = Path(CONF) / "backend" / f"{name}.yaml"
        if not re.fullmatch(r"\w+", name) or not file.exists():
            raise InputError(f"environment.backend: there is no back end {name!r}")
        with open_dict(config):
            config.merge_with(OmegaConf.load(file))
        fill_defaults(config)
    for field in ("schedule", "engine"):
        if stored.get(field) and field in config.backend:
            asked = OmegaConf.to_container(config.backend)[field]  # type: ignore[call-overload, index]
            if asked and asked != stored[field]:
                raise InputError(f"backend.{field}: the export was measured with {stored[field]}")
            config.backend[field] = stored[field]
    backend, asked = make_backend(config, target)
    if backend.name != name and (backend.name != ServerBackend.name or name == _OWN):
        raise InputError(f"backend: the export was measured with {name}, not with {backend.name}")
    if asked not in (Workload(), workload):
        stated = f"{workload.concurrency} requests in flight, for {workload.goal}"
        raise InputError(f"workload: the export was measured with {stated}")
    return backend, workload


def described(backend: Backend, workload: Workload) -> dict[str, Any]:
    """Return what exports and records say about another engine than this library's decoder, as ``backend``."""
    if backend.name == _OWN:
        return {}
    return {"backend": {"name": backend.name, "workload": dataclasses.asdict(workload), **backend.describe()}}


def supported_space(space: SearchSpace, backend: Backend) -> SearchSpace:
    """Return the space with what a back end supports, at least one method; print which are left out, and why."""
    if space.memory is not None and backend.name != _OWN:
        raise InputError(f"space.memory: has no effect on backend={backend.name}")
    by_reason: dict[str | None, list[str]] = {}
    for method in space.available_methods:
        by_reason.setdefault(backend.supports(method), []).append(method)
    left = by_reason.pop(None)  # with plain decoding, which every engine supports
    if by_reason:
        parts = "; ".join(f"{', '.join(methods)} ({reason})" for reason, methods in by_reason.items())
        print(f"space.methods: left out for backend={backend.name}: {parts}", flush=True)
        if left == ["none"]:
            raise InputError(f"space.methods: backend={backend.name} drafts with none of them")
        space = dataclasses.replace(space, methods=left)
    return backend.restrict(space)


@contextlib.contextmanager
def closing(backend: Backend) -> Iterator[None]:
    """Stop everything that a back end started after a block; print the log of an engine that failed for good."""
    try:
        yield
    except BackendError as error:
        print(error.log_tail, file=sys.stderr)
        raise
    finally:
        backend.close()
