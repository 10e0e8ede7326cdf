"""Advantage estimators, one a file. Outcome estimators see a group's rewards, the others trainable tokens only."""

from miles_core.algorithms.advantages.compute import compute_advantages, compute_value_targets
from miles_core.algorithms.advantages.estimators import ESTIMATORS
from miles_core.algorithms.advantages.sample_view import NonFiniteInputError, SampleView

__all__ = ["ESTIMATORS", "NonFiniteInputError", "SampleView", "compute_advantages", "compute_value_targets"]
