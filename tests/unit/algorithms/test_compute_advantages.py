"""From scored groups to per-token advantages: placement, masks, order of the steps, bad input."""

from dataclasses import replace

import numpy as np
import pytest

from miles_core.algorithms.advantages import (
    ESTIMATORS,
    NonFiniteInputError,
    SampleView,
    compute_advantages,
    compute_value_targets,
)
from miles_core.algorithms.advantages.sample_view import PER_TOKEN
from miles_core.config.algorithm import AlgorithmConfig


def sample(index: int, reward: float | None, mask: list[int], **fields: list[float]) -> SampleView:
    arrays = {name: np.array(values, np.float32) for name, values in fields.items()}
    return SampleView(index, reward, np.array(mask, np.uint8), **arrays)


def config(estimator: str, **options) -> AlgorithmConfig:
    if estimator.startswith("reinforce_plus_plus"):
        options = {"normalize_advantages": True} | options
    if estimator == "gspo":
        options["policy_loss"] = "gspo"
    if estimator == "none":
        options.setdefault("distill_kl_coef", 1.0)
    return AlgorithmConfig(advantage_estimator=estimator, **options)


def unwhitened(settings: AlgorithmConfig) -> AlgorithmConfig:
    return settings.model_copy(update={"normalize_advantages": False})


def as_lists(arrays: list[np.ndarray]) -> list[list[float]]:
    assert all(a.dtype == np.float32 for a in arrays)
    return [a.tolist() for a in arrays]


def test_the_table_of_estimators_is_that_of_the_config() -> None:
    assert set(ESTIMATORS) == set(AlgorithmConfig.model_fields["advantage_estimator"].annotation.__args__)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [[0.7071063, 0, 0.7071063], [0, -0.7071063]]),
        ("gspo", [[0.7071063, 0, 0.7071063], [0, -0.7071063]]),
        ("dr_grpo", [[1, 0, 1], [0, -1]]),
        ("rloo", [[2, 0, 2], [0, -2]]),
        ("none", [[0, 0, 0], [0, 0]]),
    ],
)
def test_outcome_advantages_lie_on_trainable_tokens(estimator: str, expected: list[list[float]]) -> None:
    fields = {"old_log_probs": [-1.0] * 3, "teacher_log_probs": [-1.0] * 3}
    if estimator == "none":
        group = [sample(0, 3, [1, 0, 1], **fields), sample(1, 1, [0, 1], **{k: v[:2] for k, v in fields.items()})]
    else:
        group = [sample(0, 3, [1, 0, 1]), sample(1, 1, [0, 1])]
    found = as_lists(compute_advantages(config(estimator), [group]))
    assert found == [pytest.approx(row, abs=1e-6) for row in expected]


def test_groups_have_baselines_of_their_own() -> None:
    groups = [[sample(0, 1, [1]), sample(1, 0, [1])], [sample(2, 9, [1]), sample(3, 9, [1]), sample(4, 9, [1])]]
    assert as_lists(compute_advantages(config("dr_grpo"), groups)) == [[0.5], [-0.5], [0], [0], [0]]


def test_gae_skips_tool_tokens_and_rewards_the_last_trainable_one() -> None:
    """Run over the whole response, values of the tool's tokens would make the first two 3.34375 and 7.1875."""
    group = [sample(0, 1, [1, 1, 0, 0, 1, 0], values=[0.5, 0.25, 9, 9, 0.5, 9])]
    ppo = config("ppo", gae_lambda=0.5)
    assert as_lists(compute_advantages(ppo, [group])) == [[0, 0.5, 0, 0, 0.5, 0]]
    assert as_lists(compute_value_targets(ppo, [group])) == [[0.5, 0.75, 0, 0, 1, 0]]


def test_reinforce_plus_plus_skips_tool_tokens() -> None:
    group = [sample(0, 1, [1, 0, 1], old_log_probs=[-1, -1, -1], ref_log_probs=[-1.1, -101, -1.3])]
    plus_plus = unwhitened(config("reinforce_plus_plus", kl_coef=0.5, kl_type="k1"))
    assert as_lists(compute_advantages(plus_plus, [group])) == [pytest.approx([0.80, 0, 0.85])]


def test_kl_of_the_reward_uses_the_configured_estimator() -> None:
    group = [sample(0, 0, [1], old_log_probs=[-1], ref_log_probs=[-3])]
    for kl_type, kl in (("k1", 2.0), ("k2", 2.0), ("k3", np.exp(-2) + 1), ("low_var", np.exp(-2) + 1)):
        plus_plus = unwhitened(config("reinforce_plus_plus", kl_coef=1.0, kl_type=kl_type))
        assert as_lists(compute_advantages(plus_plus, [group])) == [pytest.approx([-kl], rel=1e-6)]


def test_whitening_comes_after_distillation_and_leaves_masked_tokens_at_zero() -> None:
    group = [
        sample(0, 1, [1, 0], old_log_probs=[-1, -1], teacher_log_probs=[-1, 5]),
        sample(1, 1, [1, 1], old_log_probs=[-1, -1], teacher_log_probs=[0, -2]),
    ]
    found = compute_advantages(config("grpo", distill_kl_coef=2.0, normalize_advantages=True), [group])
    assert as_lists(found) == [[0, 0], [pytest.approx(1), pytest.approx(-1)]]  # 0, 2, -2: standard deviation 2


def test_overlong_penalty_enters_before_the_baseline() -> None:
    group = [sample(0, 1, [1] * 6), sample(1, 1, [1] * 8 + [0] * 2)]
    found = compute_advantages(config("dr_grpo", overlong_buffer=4), [group], max_response_length=10)
    assert [a[0] for a in found] == [0.5, -0.5]
    with pytest.raises(ValueError, match="overlong_buffer=4 needs max_response_length"):
        compute_advantages(config("dr_grpo", overlong_buffer=4), [group])


def test_unscored_sample_leaves_its_group_alone() -> None:
    """Counted as 0 it would shift the baseline of the others."""
    group = [sample(0, 3, [1]), sample(1, None, [0, 0]), sample(2, 1, [1])]
    assert as_lists(compute_advantages(config("dr_grpo"), [group])) == [[1], [0, 0], [-1]]
    with pytest.raises(ValueError, match="sample 7: 1 trainable tokens but no reward"):
        compute_advantages(config("dr_grpo"), [[sample(7, None, [1])]])


def test_pure_distillation_needs_no_reward() -> None:
    group = [sample(0, None, [1, 1], old_log_probs=[-1.5, -1], teacher_log_probs=[-0.5, -2])]
    assert as_lists(compute_advantages(config("none"), [group])) == [[1, -1]]


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_equal_rewards_fully_masked_and_single_samples(estimator: str) -> None:
    reward = float(np.float32(0.1))  # the critic of ppo expects just this
    fields = {"values": [reward] * 3, "old_log_probs": [-1.0] * 3, "teacher_log_probs": [-1.0] * 3}
    masks = ([1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 1])
    samples = [sample(i, reward, mask, **fields) for i, mask in enumerate(masks)]
    groups = [samples[:3], samples[3:]]
    found = compute_advantages(config(estimator), groups)
    assert as_lists(found) == [[0, 0, 0]] * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["reward", *PER_TOKEN])
def test_non_finite_input_stops_with_the_index_of_the_sample(name: str, bad: float) -> None:
    good = sample(4, 1, [0, 1])
    broken = sample(17, bad, [0, 1]) if name == "reward" else sample(17, 1, [0, 1], **{name: [0, bad]})
    with pytest.raises(NonFiniteInputError, match=f"sample 17: {name} is {bad}"):
        compute_advantages(config("grpo"), [[good, broken]])
    if name != "reward":
        masked = replace(broken, loss_mask=np.array([1, 0], np.uint8))
        assert all(np.isfinite(a).all() for a in compute_advantages(config("grpo"), [[good, masked]]))


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("length", [2, 4])
def test_fields_of_another_length_are_refused(name: str, length: int) -> None:
    with pytest.raises(ValueError, match=f"sample 5: {name} has {length} entries, loss_mask 3"):
        sample(5, 1, [1, 1, 1], **{name: [0.0] * length})


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (config("ppo"), "values"),
        (config("reinforce_plus_plus", kl_coef=0.1), "old_log_probs"),
        (config("grpo", distill_kl_coef=0.1), "old_log_probs"),
    ],
)
def test_missing_field_is_named(settings: AlgorithmConfig, name: str) -> None:
    with pytest.raises(ValueError, match=f"sample 3: the configured algorithm needs {name}"):
        compute_advantages(settings, [[sample(3, 1, [1])]])
