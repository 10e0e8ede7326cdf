"""The assembled loss: independent of the split, exact on policy, complete in its terms."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_batches import CONFIGS, MASKS, evaluate, packed_batch

from miles_core.algorithms.aggregation import loss_weights
from miles_core.algorithms.objective import finalize_metrics, policy_objective
from miles_core.config.algorithm import AlgorithmConfig, OffPolicyConfig

WHOLE = [[0, 1, 2, 3]]
SPLITS = {"one by one": [[0], [1], [2], [3]], "pairs": [[0, 1], [2, 3]], "shuffled pairs": [[3, 0], [2, 1]]}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_split_into_micro_batches_changes_nothing(config: AlgorithmConfig, split: list[list[int]]) -> None:
    batch = packed_batch(config.loss_aggregation)
    loss, gradient, metrics = evaluate(batch, config, WHOLE)
    split_loss, split_gradient, split_metrics = evaluate(batch, config, split)
    assert split_loss == pytest.approx(loss, abs=1e-6)
    assert torch.equal(split_gradient, gradient)
    assert split_metrics == pytest.approx(metrics, abs=1e-6)
    assert loss != 0 and gradient.abs().sum() > 0


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "constant"])
def test_unequal_lengths_do_not_bias_the_mean(aggregation: str) -> None:
    """Sample A: one token of loss 4; sample B: three of loss 0. A mean of micro-batch means would give 2 per token."""
    config = AlgorithmConfig(advantage_estimator="none", policy_loss="sft", loss_aggregation=aggregation)
    masks = [[1], [1, 1, 1]]
    log_probs = torch.tensor([-4.0, 0.0, 0.0, 0.0], requires_grad=True)
    weights = np.concatenate(loss_weights([np.array(mask) for mask in masks], aggregation, 5))
    batch = replace(
        packed_batch(masks=masks),
        log_probs=log_probs,
        loss_weights=torch.from_numpy(weights),
        entropy=None,
        ref_log_probs=None,
    )
    expected = {"sample_mean": (2.0, [1 / 2] + [1 / 6] * 3), "token_mean": (1.0, [1 / 4] * 4)}
    loss, gradient = expected.get(aggregation, (0.4, [1 / 10] * 4))
    for parts in ([[0, 1]], [[0], [1]], [[1], [0]]):
        found_loss, found_gradient, _ = evaluate(batch, config, parts)
        assert found_loss == pytest.approx(loss)
        assert found_gradient.tolist() == pytest.approx([-g for g in gradient])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_first_step_on_policy_has_ratio_exactly_one(config: AlgorithmConfig) -> None:
    batch = packed_batch(config.loss_aggregation)
    same = batch.log_probs.detach()
    batch = replace(batch, old_log_probs=same, rollout_log_probs=same, entropy=None)
    config = config.model_copy(update={"entropy_coef": 0.0, "kl_loss_coef": 0.0, "distill_top_k_coef": 0.0})
    loss, gradient, metrics = evaluate(batch, config, WHOLE)
    if config.policy_loss == "sft":
        return
    kept = batch.advantages * batch.loss_weights
    assert metrics["ppo_kl"] == 0 and metrics["pg_clipfrac"] == 0
    assert metrics["train_rollout_kl"] == 0 and metrics["ess_ratio"] == 1
    assert torch.equal(gradient, -kept + 0.0)
    value = kept * batch.log_probs.detach() if config.policy_loss == "cispo" else kept
    assert loss == pytest.approx(-float(value.sum()), abs=1e-7)


def test_loss_is_the_sum_of_its_terms() -> None:
    config = AlgorithmConfig(entropy_coef=0.2, kl_loss_coef=0.3, distill_top_k_coef=0.4)
    batch = packed_batch()
    loss, metrics = policy_objective(batch, config)
    terms = (
        metrics["pg_loss"] - 0.2 * metrics["entropy_loss"] + 0.3 * metrics["kl_loss"] + 0.4 * metrics["distill_loss"]
    )
    assert loss.item() == pytest.approx(terms.item(), abs=1e-6)
    loss.backward()
    assert torch.allclose(batch.entropy.grad, -0.2 * batch.loss_weights)
    assert not any(value.requires_grad for value in metrics.values())


def test_observed_terms_without_a_coefficient_leave_the_loss_alone() -> None:
    batch = packed_batch()
    plain = replace(batch, entropy=None, ref_log_probs=None)
    loss, metrics = policy_objective(batch, AlgorithmConfig())
    plain_loss, plain_metrics = policy_objective(plain, AlgorithmConfig())
    assert loss == plain_loss
    assert set(metrics) - set(plain_metrics) == {"entropy_loss", "kl_loss"}


def test_fully_masked_micro_batch_has_zero_loss_and_gradient() -> None:
    batch = packed_batch()
    loss, gradient, _ = evaluate(batch, AlgorithmConfig(kl_loss_coef=0.1), [[1], [0, 2, 3]])
    alone, _ = policy_objective(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), AlgorithmConfig())
    assert alone == 0 and np.isfinite(loss) and gradient[5:8].tolist() == [0, 0, 0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("shift", [-1e4, -100.0, 100.0, 1e4])
def test_extreme_ratios_stay_finite(config: AlgorithmConfig, shift: float) -> None:
    batch = packed_batch(config.loss_aggregation)
    for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs"):
        shifted = replace(batch, **{name: getattr(batch, name) + shift})
        loss, gradient, metrics = evaluate(shifted, config, WHOLE)
        assert np.isfinite(loss) and gradient.isfinite().all()
        assert all(np.isfinite(value) for value in metrics.values()), metrics


@pytest.mark.parametrize(
    ("method", "weight", "rejected"), [("tis", 2.0, None), ("icepop", 0.0, 1.0), ("mis", 0.0, 1.0)]
)
def test_token_far_off_the_rollout_is_capped_or_rejected(method: str, weight: float, rejected: float | None) -> None:
    """Trainer -1, rollout -100: the ratio e^99 overflows float32, and inf * 0 would be NaN."""
    config = AlgorithmConfig(off_policy=OffPolicyConfig(method=method), loss_aggregation="token_mean")
    same = torch.tensor([-1.0, -1.0])
    batch = replace(
        packed_batch("token_mean", masks=[[1, 1]]),
        log_probs=same.clone().requires_grad_(),
        old_log_probs=same,
        rollout_log_probs=torch.tensor([-100.0, -1.0]),
        advantages=torch.ones(2),
        entropy=None,
        ref_log_probs=None,
    )
    loss, gradient, metrics = evaluate(batch, config, [[0]])
    assert loss == -(weight + 1) / 2  # the rejected token keeps its place in the denominator
    assert gradient.tolist() == [-weight / 2, -1 / 2]
    assert metrics["rejected_tokens"] == (rejected or 0.0)
    assert metrics["tis_clipfrac"] == 0.5


def test_rejected_token_of_infinite_loss_does_not_enter() -> None:
    """The trainer gives it no probability at all: its CISPO loss is infinite, and 0 * inf would be NaN."""
    options = {"policy_loss": "cispo", "loss_aggregation": "token_mean"}
    config = AlgorithmConfig(**options, off_policy=OffPolicyConfig(method="icepop"))
    batch = replace(
        packed_batch("token_mean", masks=[[1, 1]]),
        log_probs=torch.tensor([-torch.inf, -1.0], requires_grad=True),
        old_log_probs=torch.tensor([-200.0, -1.0]),
        rollout_log_probs=torch.tensor([-1.0, -1.0]),
        advantages=torch.ones(2),
        entropy=None,
        ref_log_probs=None,
    )
    loss, gradient, metrics = evaluate(batch, config, [[0]])
    assert loss == 0.5
    assert gradient.tolist() == [0.0, -0.5]
    assert metrics["rejected_tokens"] == 1.0


def test_distillation_moves_towards_the_teacher_and_not_into_it() -> None:
    """A token that the teacher likes better rises, one that it likes less falls, equal log-probs do not move."""
    batch = packed_batch(masks=[[1, 1, 1]])
    student = torch.tensor([-1.5, -1.0, -0.7])
    teacher = torch.tensor([-0.5, -2.0, -0.7], requires_grad=True)
    batch = replace(
        batch,
        log_probs=student.clone().requires_grad_(),
        old_log_probs=student,
        rollout_log_probs=student,
        advantages=(teacher - student).detach(),
    )
    _, gradient, _ = evaluate(batch, CONFIGS["distillation"], [[0]])
    assert gradient.tolist() == pytest.approx([-1 / 3, 1 / 3, 0.0])
    assert teacher.grad is None


@pytest.mark.parametrize(
    ("missing", "option"),
    [
        ("entropy", "entropy_coef"),
        ("ref_log_probs", "kl_loss_coef"),
        ("top_k_log_probs", "distill_top_k_coef"),
        ("teacher_top_k_log_probs", "distill_top_k_coef"),
    ],
)
def test_missing_input_is_named_with_the_option_that_asks_for_it(missing: str, option: str) -> None:
    batch = replace(packed_batch(), **{missing: None})
    with pytest.raises(ValueError, match=rf"{missing} is None while algorithm\.{option} > 0"):
        policy_objective(batch, AlgorithmConfig(**{option: 0.1}))


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "constant"])
def test_reported_fractions_are_means_under_every_aggregation(aggregation: str) -> None:
    """All trainable tokens clipped must read 1, though one sample is masked and `constant` weights sum to less."""
    batch = packed_batch(aggregation)
    batch = replace(batch, old_log_probs=batch.log_probs.detach() - 1, advantages=torch.ones(len(batch.loss_mask)))
    _, metrics = policy_objective(batch, AlgorithmConfig(loss_aggregation=aggregation))
    final = finalize_metrics({name: float(value) for name, value in metrics.items()})
    assert final["pg_clipfrac"] == pytest.approx(1.0)
    assert final["ppo_kl"] == pytest.approx(-1.0)
    assert final["trainable_tokens"] == sum(map(sum, MASKS))
    assert not any(name.startswith("sum:") for name in final)


def test_effective_sample_ratio_is_over_all_micro_batches() -> None:
    """Ratios 2 and 1/2 in different micro-batches: (2.5)^2 / (2 * 4.25)."""
    batch = packed_batch(masks=[[1], [1]])
    rollout = batch.old_log_probs - torch.tensor([2.0, 0.5]).log()
    _, _, metrics = evaluate(replace(batch, rollout_log_probs=rollout), AlgorithmConfig(), [[0], [1]])
    assert metrics["ess_ratio"] == pytest.approx(6.25 / 8.5)
