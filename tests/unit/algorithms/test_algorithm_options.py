"""Each option changes what it promises, and a combination without effect is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from algorithm_batches import evaluate, packed_batch
from pydantic import ValidationError

from miles_core.algorithms.advantages import SampleView, compute_advantages
from miles_core.algorithms.value_objective import ValueInputs, value_objective
from miles_core.config.algorithm import AlgorithmConfig, OffPolicyConfig

# Read by the loop, which decides what is held, refreshed and stepped.
OUTSIDE = {"ref_update_interval", "critic_warmup_rollouts"}

PLUS_PLUS = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1}
# option -> (settings it needs, value that must make a difference)
EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "advantage_estimator": ({}, "rloo"),
    "policy_loss": ({}, "cispo"),
    "loss_aggregation": ({}, "constant"),
    "eps_clip": ({}, 0.05),
    "eps_clip_high": ({}, 0.05),
    "eps_clip_c": ({}, 1.01),
    "entropy_coef": ({}, 0.1),
    "kl_loss_coef": ({}, 0.1),
    "kl_coef": (PLUS_PLUS, 0.5),
    "kl_type": ({"kl_loss_coef": 0.1}, "k2"),
    "kl_unbiased": ({"kl_loss_coef": 0.1}, True),
    "gamma": (PLUS_PLUS, 0.9),
    "gae_lambda": ({"advantage_estimator": "ppo"}, 0.5),
    "value_clip": ({"advantage_estimator": "ppo"}, 0.01),
    "normalize_advantages": ({}, True),
    "distill_kl_coef": ({}, 0.5),
    "distill_top_k_coef": ({}, 0.5),
    "overlong_buffer": ({}, 3),
    "opsm_delta": ({}, 0.0),
    "off_policy": ({}, OffPolicyConfig(method="tis", upper=1.0)),
}
MIS = {"method": "mis", "lower": 0.9, "upper": 1.2}
OFF_POLICY_EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "method": ({}, "icepop"),
    "level": ({"method": "tis", "upper": 1.1}, "sequence"),
    "mode": ({"method": "tis", "lower": 0.9, "upper": 1.1}, "mask"),
    "lower": ({"method": "tis", "mode": "clip"}, 0.95),
    "upper": ({"method": "tis"}, 1.05),
    "rejection_level": (MIS, "sequence"),
    "rejection_lower": (MIS, 0.1),
    "rejection_upper": (MIS, 9.0),
    "veto_threshold": ({"method": "tis"}, 0.9),
}


def outcome(config: AlgorithmConfig) -> tuple[float, ...]:
    """Advantages, loss, gradient and value loss of one fixed rollout, all through `config`."""
    batch = packed_batch(config.loss_aggregation)
    generator = np.random.default_rng(0)
    views = []
    for i in range(4):
        mask = batch.loss_mask[batch.sequence_ids == i].numpy()
        views.append(SampleView(i, float(i % 2), mask, *generator.normal(-1, 0.3, (4, len(mask)))))
    advantages = np.concatenate(compute_advantages(config, [views], max_response_length=5))
    loss, gradient, _ = evaluate(batch, config, [[0, 1, 2, 3]])
    values, old_values, returns = torch.from_numpy(generator.normal(size=(3, len(advantages)))).float()
    value, _ = value_objective(ValueInputs(values, old_values, returns, batch.loss_mask, batch.loss_weights), config)
    return (*advantages.tolist(), loss, *gradient.tolist(), value.item())


@pytest.mark.parametrize(("option", "case"), EFFECTS.items(), ids=EFFECTS.keys())
def test_every_option_has_an_effect(option: str, case: tuple[dict[str, Any], Any]) -> None:
    settings, value = case
    assert outcome(AlgorithmConfig(**settings)) != outcome(AlgorithmConfig(**(settings | {option: value})))


@pytest.mark.parametrize(("option", "case"), OFF_POLICY_EFFECTS.items(), ids=OFF_POLICY_EFFECTS.keys())
def test_every_off_policy_option_has_an_effect(option: str, case: tuple[dict[str, Any], Any]) -> None:
    settings, value = case
    before, after = (OffPolicyConfig(**s) for s in (settings, settings | {option: value}))
    assert outcome(AlgorithmConfig(off_policy=before)) != outcome(AlgorithmConfig(off_policy=after))


def test_no_option_is_left_out() -> None:
    assert set(EFFECTS) | OUTSIDE == set(AlgorithmConfig.model_fields)
    assert set(OFF_POLICY_EFFECTS) == set(OffPolicyConfig.model_fields)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_coef": 0.1, "kl_loss_coef": 0.1}, "set one of them to 0"),
        ({"kl_coef": 0.1}, "kl_coef 0.1 has no effect on grpo"),
        ({"advantage_estimator": "reinforce_plus_plus"}, "normalize_advantages=true"),
        ({"kl_unbiased": True}, "kl_unbiased=true has no effect"),
        ({"gamma": 0.9}, "gamma 0.9 has no effect on grpo"),
        ({"gae_lambda": 0.9}, "gae_lambda 0.9 has no effect on grpo"),
        ({"advantage_estimator": "gspo"}, "needs policy_loss=gspo, found ppo_clip"),
        ({"advantage_estimator": "none"}, "leaves nothing to learn from"),
        ({"policy_loss": "sft"}, "needs advantage_estimator=none, found grpo"),
        ({"policy_loss": "cispo", "eps_clip_c": 3}, "eps_clip_c 3.0 has no effect on policy_loss=cispo"),
        ({"advantage_estimator": "none", "policy_loss": "sft", "opsm_delta": 0.1}, "opsm_delta 0.1 has no effect"),
        ({"off_policy": {"lower": 0.6}}, "off_policy.lower=0.6 has no effect with off_policy.method=none"),
        ({"off_policy": {"method": "tis", "rejection_lower": 0.6}}, "needs off_policy.method=mis, found tis"),
        ({"off_policy": {"method": "icepop", "level": "sequence"}}, "icepop is level=token with mode=mask"),
        ({"off_policy": {"method": "tis", "lower": 3}}, r"off_policy.lower 3.0 must be below off_policy.upper 2.0"),
        ({"off_policy": {"method": "mis", "rejection_lower": 3}}, r"rejection_lower 3.0 must be below .*upper 2.0"),
    ],
)
def test_options_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig(**settings)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValidationError) as error:
        AlgorithmConfig(gamma=0.9, kl_unbiased=True, kl_coef=0.1)
    assert all(name in str(error.value) for name in ("algorithm.gamma", "algorithm.kl_unbiased", "algorithm.kl_coef"))


@pytest.mark.parametrize("settings", [{}, {"off_policy": {"method": "mis"}}, PLUS_PLUS], ids=str)
def test_a_dump_is_a_valid_configuration(settings: dict[str, Any]) -> None:
    config = AlgorithmConfig(**settings)
    assert AlgorithmConfig(**config.model_dump()) == config
