"""From responses to rewards."""

from miles_core.rewards.reward import REWARDS, RewardFn, build_reward
from miles_core.rewards.scoring import RewardError, Scorer, build_scorer

__all__ = ["REWARDS", "RewardError", "RewardFn", "Scorer", "build_reward", "build_scorer"]
