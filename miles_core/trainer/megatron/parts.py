"""The modules that a layer is made of, for each way to compute."""

from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from miles_core.trainer.megatron import exact
from miles_core.trainer.megatron.attention import CoreAttention
from miles_core.trainer.megatron.experts import FixedBiasRouter, GroupedExperts
from miles_core.trainer.megatron.norm import RmsNorm


@dataclass(frozen=True)
class Parts:
    """Classes, by what they do."""

    norm: type[RmsNorm] = RmsNorm
    column: type[ColumnParallelLinear] = ColumnParallelLinear
    row: type[RowParallelLinear] = RowParallelLinear
    attention: type[CoreAttention] = CoreAttention
    router: type[FixedBiasRouter] = FixedBiasRouter
    experts: type[GroupedExperts] = GroupedExperts


_EXACT = Parts(
    exact.ExactRmsNorm,
    exact.ExactColumnParallelLinear,
    exact.ExactRowParallelLinear,
    exact.ExactCoreAttention,
    exact.ExactRouter,
    exact.ExactExperts,
)


def parts_for(*, exact: bool) -> Parts:
    """The parts of a model whose log-probs are to equal the embedded engine's in every bit, or the fastest."""
    return _EXACT if exact else Parts()


def biased(linear: type[Any]) -> type[Any]:
    """`linear` with a bias, whatever TransformerConfig.add_bias_linear says of all projections together."""

    class Biased(linear):
        def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
            super().__init__(*args, bias=True, **kwargs)

    return Biased
