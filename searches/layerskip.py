"""Search for the fastest lossless decoding of a target, confirm it on held-out prompts, and export it.

Usage: ``python -m searches.layerskip [group=choice] [field=value]``
"""

from omegaconf import DictConfig

from searches.app.application import run
from searches.study.supervisor import supervise
from searches.sweep import search


def start(config: DictConfig) -> None:
    """Run a study in this process, or in several workers that it starts."""
    if config.study.workers is None:
        search(config)
    else:
        supervise(config)


if __name__ == "__main__":
    run("layerskip", start)
