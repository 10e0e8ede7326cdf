"""One optimizer step: on-policy ratios, bad gradients, precision, and the weights that leave the trainer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import trainer_of, weight_digests
from trainer_models import folder_digests, make_samples, run_config

_NAME, _COUNT = "glm4-moe-mtp", 6


@pytest.mark.parametrize("policy_loss", ["ppo_clip", "gspo", "cispo"])
def test_the_first_step_is_exactly_on_policy(policy_loss: str) -> None:
    config = run_config(_NAME, samples=_COUNT, algorithm={"policy_loss": policy_loss})
    with trainer_of(_NAME, config) as trainer:
        metrics = trainer.train_step(make_samples(_NAME, _COUNT))
    assert metrics["train/ppo_kl"] == 0.0
    assert metrics["train/pg_clipfrac"] == 0.0
    assert metrics["train/grad_norm"] > 0


@pytest.mark.parametrize("packing", [True, False])
def test_old_log_probs_of_an_unchanged_policy_give_a_ratio_of_exactly_one(packing: bool) -> None:
    """Two optimizer steps a rollout: log-probs of the whole rollout first, in the micro-batches of the first step."""
    samples = make_samples(_NAME, 2 * _COUNT)
    config = run_config(
        _NAME, samples=2 * _COUNT, trainer={"global_batch_size": _COUNT, "micro_batch_size": 2, "packing": packing}
    )
    with trainer_of(_NAME, config) as trainer:
        old = trainer.log_probs(samples, "policy")
        batch = [replace(s, old_log_probs=lp) for s, lp in zip(samples, old, strict=True)]
        first, second = trainer.train_step(batch[:_COUNT]), trainer.train_step(batch[_COUNT:])
    assert first["train/ppo_kl"] == 0.0
    assert first["train/pg_clipfrac"] == 0.0
    assert second["train/ppo_kl"] != 0.0


def test_mismatch_metrics_by_hand() -> None:
    """With the trainer's own log-probs moved by 0.5 as the rollout's: |diff| 0.5, k3 of exp(0.5), no lost samples."""
    samples = make_samples(_NAME, _COUNT)
    with trainer_of(_NAME, run_config(_NAME, samples=_COUNT)) as trainer:
        moved = [
            replace(s, rollout_log_probs=(lp - 0.5).astype(np.float32))
            for s, lp in zip(samples, trainer.log_probs(samples, "policy"), strict=True)
        ]
        metrics = trainer.train_step(moved)
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.5, rel=1e-5)
    assert metrics["train/train_rollout_kl"] == pytest.approx(np.exp(0.5) - 1 - 0.5, rel=1e-4)
    assert metrics["train/ess_ratio"] == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_non_finite_gradient_changes_nothing(bad: float) -> None:
    """Not the weights, not Adam's state, not the learning rate: the next step is as if it had never been."""
    samples = make_samples(_NAME, _COUNT)
    poisoned = [*samples[:-1], replace(samples[-1], loss_weights=np.full_like(samples[-1].loss_weights, bad))]
    config = run_config(_NAME, samples=_COUNT, trainer={"micro_batch_size": 2, "optimizer": {"warmup_steps": 3}})
    with trainer_of(_NAME, config) as trainer:
        expected = [trainer.train_step(samples), trainer.train_step(samples)]
        weights = weight_digests(trainer)
    with trainer_of(_NAME, config) as trainer:
        first = trainer.train_step(samples)
        before = weight_digests(trainer)
        skipped = trainer.train_step(poisoned)
        assert skipped["train/skipped_steps"] == 1.0
        assert not np.isfinite(skipped["train/grad_norm"])
        assert weight_digests(trainer) == before
        assert [first, trainer.train_step(samples)] == expected
        assert weight_digests(trainer) == weights
    assert expected[0]["train/skipped_steps"] == 0.0


def test_clipping_scales_the_step_not_the_reported_norm() -> None:
    """Two limits below the norm give the same direction: Adam's first moments differ by the ratio of the limits."""
    samples = make_samples(_NAME, _COUNT)
    moments = []
    for clip in (0.5, 0.25):
        config = run_config(_NAME, samples=_COUNT, trainer={"optimizer": {"clip_grad": clip}})
        with trainer_of(_NAME, config) as trainer:
            metrics = trainer.train_step(samples)
            state = trainer._optimizer.megatron.chained_optimizers[0].state.values()
            moments.append([s["exp_avg"].clone() for s in state])
        assert metrics["train/grad_norm"] > 0.5
    for larger, smaller in zip(*moments, strict=True):
        torch.testing.assert_close(larger, 2 * smaller)


def test_the_learning_rate_warms_up() -> None:
    samples = make_samples(_NAME, _COUNT)
    config = run_config(_NAME, samples=_COUNT, trainer={"optimizer": {"lr": 1e-3, "warmup_steps": 2}})
    with trainer_of(_NAME, config) as trainer:
        rates = [trainer.train_step(samples)["train/lr-pg_0"] for _ in range(3)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3])


def test_frozen_mtp_layers_stay_while_the_shared_tensors_move() -> None:
    samples, before = make_samples(_NAME, _COUNT), folder_digests(_NAME)
    with trainer_of(_NAME, run_config(_NAME, samples=_COUNT)) as trainer:
        trainer.train_step(samples)
        after = weight_digests(trainer)
    mtp, shared = "model.layers.2.", ("embed_tokens.weight", "shared_head.head.weight")
    for name in before:
        frozen = (name.startswith(mtp) and not name.endswith(shared)) or name.endswith("e_score_correction_bias")
        if frozen or ".mlp.experts." not in name:  # an expert that no token chose stays as well
            assert (after[name] == before[name]) == frozen, name
    assert after[f"{mtp}embed_tokens.weight"] == after["model.embed_tokens.weight"]
    assert after[f"{mtp}shared_head.head.weight"] == after["lm_head.weight"]


def test_bf16_keeps_fp32_master_weights() -> None:
    """Steps too small for bf16 add up; log-probs stay near those of fp32; weights leave in the folder's fp32."""
    samples = make_samples(_NAME, _COUNT)
    with trainer_of(_NAME, run_config(_NAME, samples=_COUNT)) as trainer:
        exact = np.concatenate(trainer.log_probs(samples, "policy"))
    config = run_config(_NAME, samples=_COUNT, trainer={"precision": "bf16", "optimizer": {"lr": 1e-5}})
    with trainer_of(_NAME, config) as trainer:
        np.testing.assert_allclose(np.concatenate(trainer.log_probs(samples, "policy")), exact, atol=0.05)
        before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
        norm = trainer._model.decoder.final_layernorm.weight
        for _ in range(3):  # 1e-5 each is far below bf16's spacing of 2^-8 under 1
            trainer.train_step(samples)
        assert norm.dtype == torch.bfloat16
        assert norm.eq(1).all()
        assert (norm.main_param - 1).abs().max() > 2e-5
        after = dict(trainer.named_weights())
    assert {t.dtype for t in after.values()} == {torch.float32}
    assert any(not after[name].equal(before[name]) for name in after)


def test_the_reference_is_refused_where_none_is_held() -> None:
    with (
        trainer_of(_NAME, run_config(_NAME, samples=_COUNT)) as trainer,
        pytest.raises(ValueError, match=r"kl_loss_coef or algorithm\.kl_coef"),
    ):
        trainer.log_probs(make_samples(_NAME, _COUNT), "reference")


def test_log_probs_come_back_in_the_order_of_the_batch() -> None:
    samples = make_samples(_NAME, _COUNT)
    config = run_config(_NAME, samples=_COUNT, trainer={"micro_batch_size": 1})
    with trainer_of(_NAME, config) as trainer:
        together = trainer.log_probs(samples, "policy")
        for sample, log_probs in zip(samples, together, strict=True):
            (alone,) = trainer.log_probs([sample], "policy")
            np.testing.assert_array_equal(log_probs, alone)
