"""Search for the fastest lossless decoding of a target, confirm it on held-out prompts, and export it.

Usage: ``python -m searches.layerskip [group=choice] [field=value]``
"""

from omegaconf import DictConfig

from searches.app.application import run
from searches.report.markdown import summary
from searches.report.page import LiveView
from searches.report.publish import Publisher
from searches.study.supervisor import supervise
from searches.study.sweep import Reports, search


def start(config: DictConfig) -> None:
    """Run a study in this process, or in several workers that it starts."""
    if config.study.workers is None:
        search(config, Reports(LiveView, Publisher, summary))
    else:
        supervise(config)


if __name__ == "__main__":
    run("layerskip", start)
