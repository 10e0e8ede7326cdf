"""TransformerConfig is built for what fits; what does not is refused before any process group is joined."""

from dataclasses import replace

import pytest
from trainer_models import geometry_of

from miles_core.config.trainer import TrainerConfig
from miles_core.trainer.megatron.model_config import UnsupportedGeometryError, transformer_config


def _trainer(ranks: int, **parallel: int) -> TrainerConfig:
    return TrainerConfig.model_validate({"num_ranks": ranks, "parallel": parallel})


def test_what_fits_is_built() -> None:
    config = transformer_config(
        geometry_of("glm4-moe"), _trainer(4, expert=2, pipeline=2), mtp_num_layers=0, routing_replay=False
    )
    assert (config.num_moe_experts, config.num_layers) == (8, 4)


def test_what_does_not_is_refused_with_every_fault() -> None:
    geometry = replace(geometry_of("glm4-moe"), qk_norm="full")
    with pytest.raises(UnsupportedGeometryError, match=r"Glm4MoeForCausalLM: .*parallel\.tensor 3.*no rank has all"):
        transformer_config(geometry, _trainer(3, tensor=3), mtp_num_layers=0, routing_replay=False)
