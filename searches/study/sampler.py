"""Samplers of OptunaHub, whose code is no part of Optuna."""

from __future__ import annotations

import warnings

from optuna.samplers import BaseSampler

from searches.app.checks import InputError
from searches.app.interrupt import is_interrupt


def auto(seed: int, registry_root: str | None = None) -> BaseSampler:
    """Return OptunaHub's AutoSampler, which chooses one of Optuna's samplers by the space and the number of trials.

    Args:
        registry_root: the folder ``package`` of a copy of optunahub-registry; None downloads the sampler from GitHub and
            runs it.
    """
    package = "samplers/auto_sampler"
    try:
        import optunahub  # optional

        if registry_root is None:
            module = optunahub.load_module(package)
        else:
            module = optunahub.load_local_module(package, registry_root=registry_root)
        sampler: BaseSampler = module.AutoSampler(seed=seed)
    except ModuleNotFoundError as error:
        raise InputError(f"sampler: auto needs {error.name}; this package's extra optunahub installs it") from error
    except Exception as error:  # of its downloads, or of the code that it loads
        if is_interrupt(error):
            raise
        field = "sampler: auto" if registry_root is None else f"sampler.registry_root: {registry_root}"
        hint = "; sampler.registry_root names a copy" if registry_root is None else ""
        raise InputError(f"{field}: cannot be loaded: {str(error) or type(error).__name__}{hint}") from error
    warnings.filterwarnings("ignore", message=".*warn_independent_sampling", category=FutureWarning)  # it sets it
    return sampler
