"""A closed trainer goes, and with its models their process groups, each of which has threads."""

import gc

import pytest
from ranks import trainer_of
from trainer_models import make_samples, run_config

from miles_core.trainer.megatron.model import PolicyModel


def models() -> int:
    """Models that are alive in this process."""
    gc.collect()
    return sum(isinstance(thing, PolicyModel) for thing in gc.get_objects())


@pytest.mark.parametrize("name", ["llama-tied", "glm4-moe-mtp"])
def test_nothing_keeps_the_model_of_a_closed_trainer(name: str) -> None:
    before = models()
    with trainer_of(name, run_config(name, samples=4)) as trainer:
        trainer.train_step(make_samples(name, 4))
        assert models() > before
    del trainer
    assert models() == before
