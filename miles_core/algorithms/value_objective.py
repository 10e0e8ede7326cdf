"""From the critic's values of a micro-batch to its share of the value loss."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from miles_core.algorithms.masking import masked, weighted_sum
from miles_core.algorithms.value_loss import value_loss
from miles_core.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class ValueInputs:
    """Response tokens, packed as in `ObjectiveInputs`, float32 unless stated. Masked entries may hold anything."""

    values: Tensor  # [N], with gradient
    old_values: Tensor  # [N], the critic's before the rollout's first step
    returns: Tensor  # [N], from advantages.compute_value_targets
    loss_mask: Tensor  # bool [N]
    loss_weights: Tensor  # [N], from aggregation.loss_weights


def value_objective(inputs: ValueInputs, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Share of these tokens in the value loss of the global batch, and metrics; sums, as in `policy_objective`."""
    mask, weights = inputs.loss_mask, inputs.loss_weights
    loss, clipped = value_loss(inputs.values, inputs.old_values, inputs.returns, mask, clip=config.value_clip)
    total = weighted_sum(loss, weights, mask)
    returns = masked(inputs.returns, mask)
    errors = returns - masked(inputs.values, mask)
    metrics = {
        "value_loss": total,
        "value_clipfrac": weighted_sum(clipped.float(), weights, mask),
        "sum:loss_weights": masked(weights, mask).sum(),
        "sum:tokens": mask.float().sum(),
        "sum:returns": returns.sum(),
        "sum:squared_returns": returns.square().sum(),
        "sum:errors": errors.sum(),
        "sum:squared_errors": errors.square().sum(),
    }
    return total, {name: value.detach() for name, value in metrics.items()}


def finalize_value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Values to report, from the metrics of `value_objective` added up over the global batch.

    explained_variance = 1 - Var(return - value) / Var(return) over tokens: 1 is perfect, 0 no better than a constant.
    It is 0 where all returns are equal.
    """
    n = sums["sum:tokens"]
    of_returns = sums["sum:squared_returns"] / n - (sums["sum:returns"] / n) ** 2
    of_errors = sums["sum:squared_errors"] / n - (sums["sum:errors"] / n) ** 2
    return {
        "value_loss": sums["value_loss"],
        "value_clipfrac": sums["value_clipfrac"] / sums["sum:loss_weights"],
        "explained_variance": 1 - of_errors / of_returns if of_returns > 0 else 0.0,
    }
