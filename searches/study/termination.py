"""The end of the trials, once another one is expected to take longer than the time that it saves.

Optuna's terminators fit a Gaussian process to the parameters that all trials share. The trials here share only the method,
since each method has parameters of its own, and most are pruned. The estimate of this module knows speedups alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection

import optuna

from layerskip import SpeculativeConfig
from searches.study.leaderboard import Leaderboard, leaderboard
from searches.study.objective import OVERHEAD_SECONDS

_MIN_SAMPLED = 8  # trials after those that every study begins with


def why_not_another(study: optuna.Study, tokens: int, starts: Collection[SpeculativeConfig]) -> str:
    """Return when trials ended to be worth their seconds to a user who will decode so many tokens; empty if they are."""
    board = leaderboard(study)
    measured = [trial.user_attrs["measurement"] for trial in board.trials if "measurement" in trial.user_attrs]
    is_early = len(board.trials) < len(starts) + _MIN_SAMPLED or not board.entries.keys() >= set(starts)
    if is_early or not measured:
        return ""
    seconds = statistics.fmean(t.user_attrs["seconds"] + t.user_attrs.get(OVERHEAD_SECONDS, 0.0) for t in board.trials)
    plain = statistics.fmean(each["baseline_tokens_per_second"] for each in measured)
    speedup = max(1.0, board.leader.speedup if board.leader is not None else 1.0)
    saved = tokens / (plain * speedup) * -math.expm1(-expected_gain(board))
    if saved >= seconds:
        return ""
    return f"until another one was expected to take {seconds:.1f} s, and to save {saved:.1f} s of {tokens} tokens"


def expected_gain(board: Leaderboard) -> float:
    """Return by how much another trial is expected to raise the logarithm of the leader's speedup.

    This is the gain per trial of the later half of the finished trials: over the best of the earlier half, or over the best
    of a random half on average, whichever is larger. The former sees a sampler that learns. The latter does not take an
    early leader, which may be luck, for the end of all gains. Gains get rarer, so the estimate is rather too high.
    """
    if (leader := board.leader) is None or leader.speedup <= 1.0:
        return 0.0
    count, half = len(board.trials), len(board.trials) // 2
    most = math.log(leader.speedup)  # over plain decoding, which is always there
    losses = sorted((min(most, max(0.0, math.log(leader.over(entry)))), entry.first) for entry in board.ranking)
    ways = [math.comb(count - 1 - place, half - 1) for place in range(len(losses))]  # to be the best of a half
    random = most + sum(n * (loss - most) for n, (loss, _) in zip(ways, losses, strict=True)) / math.comb(count, half)
    earlier = min((loss for loss, first in losses if first < board.trials[half].number), default=most)
    return max(random, earlier) / (count - half)
