"""Tables of throughput and latency: the Pareto front against its definition, and a table for each number of requests."""

from __future__ import annotations

import itertools
import random

from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from layerskip import SpeculativeConfig
from searches.report.load_report import load_tables, pareto_front


def test_the_front_is_what_no_other_point_exceeds() -> None:
    source = random.Random(3)
    points = {n: (float(source.randint(0, 9)), float(source.randint(1, 9))) for n in range(40)}
    front = pareto_front(points | {40: (99.0, None), 41: (None, 0.1)})
    for name, (more, less) in points.items():
        exceeded = any(a >= more and b <= less and (a, b) != (more, less) for a, b in points.values())
        assert (name in front) == (not exceeded)
    assert all(points[one][0] >= points[other][0] for one, other in itertools.pairwise(front))


def _trial(number: int, lossless: str, figures: dict[str, float]) -> FrozenTrial:
    trial = create_trial(
        state=TrialState.COMPLETE,
        value=1.0,
        params={"kind": "none"},
        distributions={"kind": CategoricalDistribution(["none"])},
        user_attrs={
            "config": SpeculativeConfig("prompt_lookup", number).to_dict(),
            "measurement": {"losslessness": {"verdict": lossless}},
            "figures": figures,
        },
    )
    trial.number = number
    return trial


def test_each_number_of_requests_has_a_table() -> None:
    trials = [
        _trial(1, "exact", {"throughput_at_1": 10.0, "tpot_p50_at_1": 0.1, "throughput_at_8": 30.0, "tpot_p50_at_8": 0.3}),
        _trial(2, "exact", {"throughput_at_1": 9.0, "tpot_p50_at_1": 0.2, "throughput_at_8": 20.0, "tpot_p50_at_8": 0.2}),
        _trial(3, "different", {"throughput_at_1": 99.0, "tpot_p50_at_1": 0.01}),
        _trial(4, "exact", {}),
    ]
    lines = load_tables(trials)
    titles = [line for line in lines if line.startswith("## ")]
    assert [line.split(", ")[1] for line in titles] == [f"{n} requests in flight (Pareto front)" for n in (1, 8)]
    first, second = (lines.index(title) for title in titles)
    numbers = [[line.split(" | ")[0] for line in part if line[:3] in ("| 1", "| 2", "| 3", "| 4")]
               for part in (lines[first:second], lines[second:])]  # fmt: skip
    assert numbers == [["| 1"], ["| 1", "| 2"]]
    assert load_tables([trials[3]]) == []
