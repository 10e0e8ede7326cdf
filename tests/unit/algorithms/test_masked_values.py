"""Nothing that stands at a masked token may reach a result or a gradient, in any function."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_batches import CONFIGS, evaluate, packed_batch
from torch import Tensor

import miles_core.algorithms
from miles_core.algorithms.advantages import ESTIMATORS, SampleView, compute_advantages, compute_value_targets
from miles_core.algorithms.cispo import cispo
from miles_core.algorithms.distillation import top_k_reverse_kl
from miles_core.algorithms.gspo import gspo
from miles_core.algorithms.kl import kl_divergence, unbiased_kl
from miles_core.algorithms.masking import masked, sequence_mean, sequence_sum, weighted_sum
from miles_core.algorithms.mismatch import logprob_abs_diff, mismatch_kl
from miles_core.algorithms.mtp import mtp_objective
from miles_core.algorithms.off_policy import importance_ratio, off_policy_correction, vetoed
from miles_core.algorithms.opsm import off_policy_sequence_mask
from miles_core.algorithms.policy_loss import clipped_surrogate, ppo_clip
from miles_core.algorithms.sft import sft_loss
from miles_core.algorithms.value_loss import value_loss
from miles_core.algorithms.value_objective import ValueInputs, finalize_value_metrics, value_objective
from miles_core.config.algorithm import AlgorithmConfig, OffPolicyConfig

POISON = [float("nan"), float("inf"), float("-inf"), 1e30]
MASK = torch.tensor([True, False, True, False, False, True, True])
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2])
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
OFF_POLICY = [
    OffPolicyConfig(method="tis", mode="clip"),
    OffPolicyConfig(method="tis", level="geometric"),
    OffPolicyConfig(method="icepop"),
    OffPolicyConfig(method="mis", level="sequence", veto_threshold=0.6),
]

# name -> function of per-token tensors [7], the first of which carries the gradient
FUNCTIONS: dict[str, tuple[Callable[..., object], int]] = {
    "masked": (lambda a: masked(a, MASK), 1),
    "weighted_sum": (lambda a, b: weighted_sum(a, b, MASK), 2),
    "sequence_sum": (lambda a: sequence_sum(a, MASK, IDS), 1),
    "sequence_mean": (lambda a: sequence_mean(a, MASK, IDS), 1),
    **{
        f"kl_divergence {t}": (lambda a, b, t=t: kl_divergence(a, b, MASK, kl_type=t), 2)
        for t in ("k1", "k2", "k3", "low_var")
    },
    "unbiased_kl": (lambda a, b, c: unbiased_kl(a, b, c, MASK), 3),
    "clipped_surrogate": (lambda a, b: clipped_surrogate(a, b, MASK, **CLIP, dual_clip=3.0), 2),
    "ppo_clip": (lambda a, b, c: ppo_clip(a, b, c, MASK, **CLIP), 3),
    "gspo": (lambda a, b, c: gspo(a, b, c, MASK, IDS, **CLIP), 3),
    "cispo": (lambda a, b, c: cispo(a, b, c, MASK, **CLIP), 3),
    "sft_loss": (lambda a: sft_loss(a, MASK), 1),
    "value_loss": (lambda a, b, c: value_loss(a, b, c, MASK, clip=0.2), 3),
    "top_k_reverse_kl": (lambda a, b: top_k_reverse_kl(pair(a), pair(b), MASK), 2),
    "logprob_abs_diff": (lambda a, b: logprob_abs_diff(a, b, MASK), 2),
    "mismatch_kl": (lambda a, b: mismatch_kl(a, b, MASK), 2),
    "off_policy_sequence_mask": (lambda a, b, c: off_policy_sequence_mask(a, b, c, MASK, IDS, delta=0.01), 3),
    "mtp_objective": (lambda a, b, c: loss_and_metrics(mtp_objective(a, b > -1, MASK, c, depth=1)), 3),
    "vetoed": (lambda a, b: vetoed(a, b, MASK, IDS, threshold=0.6), 2),
    **{
        f"importance_ratio {level}": (lambda a, b, level=level: importance_ratio(a, b, MASK, IDS, level=level), 2)
        for level in ("token", "sequence", "geometric")
    },
    **{
        f"off_policy_correction {i}": (lambda a, b, c=c: off_policy_correction(a, b, MASK, IDS, config=c), 2)
        for i, c in enumerate(OFF_POLICY)
    },
}
# Take no per-token value besides the mask, or a ratio that is already without masked values.
WITHOUT_MASKED_VALUES = {"importance_weights", "reject", "loss_weights"}
TESTED_BELOW = {"policy_objective", "value_objective", "compute_advantages", "compute_value_targets"}


def loss_and_metrics(found: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, ...]:
    return found[0], *found[1].values()


def pair(values: Tensor) -> Tensor:
    """Log-probs of two entries per token."""
    return torch.stack([values - 1, values - 2], dim=-1)


def results(function: Callable[..., object], inputs: list[Tensor]) -> list[Tensor]:
    """Every output, and the gradient of the first input at its trainable tokens, if there is one."""
    leaf = inputs[0].clone().requires_grad_()
    found = function(leaf, *inputs[1:])
    outputs = list(found) if isinstance(found, tuple) else [found]
    differentiable = [output.sum() for output in outputs if output.requires_grad]
    if differentiable:
        sum(differentiable).backward()
        assert (leaf.grad[~MASK] == 0).all()
        outputs.append(leaf.grad)
    return [output.detach() for output in outputs]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(("function", "arity"), FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_masked_values_never_matter(function: Callable[..., object], arity: int, poison: float) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [-1 + 0.4 * torch.randn(7, generator=generator) for _ in range(arity)]
    expected = results(function, inputs)
    for position in range(arity):
        poisoned = list(inputs)
        poisoned[position] = torch.where(MASK, inputs[position], poison)
        for found, wanted in zip(results(function, poisoned), expected, strict=True):
            assert torch.equal(found, wanted)


def test_every_function_that_takes_a_mask_is_tested_here() -> None:
    named = {name.split()[0] for name in FUNCTIONS} | WITHOUT_MASKED_VALUES | TESTED_BELOW
    for module in pkgutil.walk_packages(miles_core.algorithms.__path__, "miles_core.algorithms."):
        for name, function in inspect.getmembers(importlib.import_module(module.name), inspect.isfunction):
            takes_mask = {"mask", "loss_masks", "trainable"} & set(inspect.signature(function).parameters)
            if function.__module__ == module.name and takes_mask and not name.startswith("_"):
                assert name in named, f"{module.name}.{name}"


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_masked_inputs_never_matter_to_the_objective(config: AlgorithmConfig, poison: float) -> None:
    batch = packed_batch(config.loss_aggregation)
    mask = batch.loss_mask

    def poisoned(values: Tensor) -> Tensor:
        rows = mask.reshape(-1, *[1] * (values.dim() - 1))
        return torch.where(rows, values.detach(), poison).requires_grad_(values.requires_grad)

    names = set(vars(batch)) - {"loss_mask", "sequence_ids"}
    other = replace(batch, **{name: poisoned(getattr(batch, name)) for name in names})
    loss, gradient, metrics = evaluate(batch, config, [[0, 1, 2, 3]])
    other_loss, other_gradient, other_metrics = evaluate(other, config, [[0, 1, 2, 3]])
    assert other_loss == loss and other_metrics == metrics
    assert torch.equal(other_gradient, gradient)
    assert (gradient[~mask] == 0).all()


@pytest.mark.parametrize("poison", POISON)
def test_masked_inputs_never_matter_to_the_value_objective(poison: float) -> None:
    config = AlgorithmConfig(advantage_estimator="ppo")
    values, old_values, returns = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    weights = MASK / MASK.sum()

    def outcome(fill: float) -> tuple[dict[str, float], Tensor]:
        leaf = torch.where(MASK, values, fill).requires_grad_()
        others = (torch.where(MASK, x, fill) for x in (old_values, returns))
        loss, metrics = value_objective(ValueInputs(leaf, *others, MASK, torch.where(MASK, weights, fill)), config)
        loss.backward()
        return finalize_value_metrics({k: float(v) for k, v in metrics.items()}), leaf.grad

    (metrics, gradient), (clean_metrics, clean_gradient) = outcome(poison), outcome(0.0)
    assert metrics == clean_metrics
    assert torch.equal(gradient, clean_gradient)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_masked_inputs_never_matter_to_advantages(estimator: str, poison: float) -> None:
    config = AlgorithmConfig(
        advantage_estimator=estimator,
        policy_loss="gspo" if estimator == "gspo" else "ppo_clip",
        kl_coef=0.1 if estimator.startswith("reinforce") or estimator == "ppo" else 0.0,
        distill_kl_coef=0.5,
        normalize_advantages=True,
    )

    def groups(fill: float) -> list[list[SampleView]]:
        generator = np.random.default_rng(0)
        masks = [[1, 0, 1, 1, 0], [0, 1], [0, 0, 1]]
        return [
            [
                SampleView(i, float(i), m, *(np.where(m, generator.normal(size=len(m)), fill) for _ in range(4)))
                for i, m in enumerate(np.array(mask) for mask in masks)
            ]
        ]

    functions = [compute_advantages] + ([compute_value_targets] if estimator == "ppo" else [])
    for function in functions:
        for found, wanted in zip(function(config, groups(poison)), function(config, groups(0.0)), strict=True):
            assert np.array_equal(found, wanted)
            assert np.isfinite(found).all()
