"""MTP training: what the layers compute, what they learn, and that the policy does not notice."""

from functools import partial

import numpy as np
import pytest
import torch
from ranks import on_ranks, trainer_of, weight_digests
from torch import Tensor
from torch.nn import functional as F
from trainer_models import hf_folder, make_samples, run_config
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask

from conversion.safetensors_io import SafetensorsFolder
from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample

_GLM, _COUNT, _SCALE = "glm4-moe-mtp", 6, 0.2
_TEMPERATURE = 0.7  # of `run_config`
_config = partial(run_config, samples=_COUNT)


def _trained(**trainer: object) -> dict[str, object]:
    return {"mtp_loss_scale": _SCALE, **trainer}


class _Reference:
    """Trunk and MTP layer of a folder, made of transformers' modules."""

    def __init__(self, name: str) -> None:
        folder = hf_folder(name)
        config = AutoConfig.from_pretrained(folder)
        config.num_hidden_layers += 1  # the decoder layer inside the MTP layer has the number after the last
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        )
        self.number = self.model.config.num_hidden_layers = config.num_hidden_layers - 1
        with SafetensorsFolder(folder) as tensors:
            names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            self.weights = {n: tensors.read(f"model.layers.{self.number}.{n}.weight") for n in names}

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [T] -> logits of the main head [T, V] and of the MTP layer [T - 1, V], which has no token T."""
        core, w, eps = self.model.model, self.weights, self.model.config.rms_norm_eps
        hidden = core(tokens[None]).last_hidden_state
        norm = partial(F.rms_norm, normalized_shape=hidden.shape[-1:], eps=eps)
        embedded = norm(core.embed_tokens(tokens[None, 1:]), weight=w["enorm"])
        x = torch.cat([embedded, norm(hidden[:, :-1], weight=w["hnorm"])], -1) @ w["eh_proj"].T
        positions = torch.arange(x.shape[1])[None]
        mask = create_causal_mask(
            config=core.config, inputs_embeds=x, attention_mask=None, cache=None, position_ids=positions
        )
        x = core.layers[self.number](
            x, attention_mask=mask, position_ids=positions, position_embeddings=core.rotary_emb(x, positions)
        )
        head = self.model.lm_head
        return head(hidden)[0], head(norm(x, weight=w["shared_head.norm"]))[0]


@pytest.mark.parametrize("name", [_GLM, "glm4-moe+mtp", "deepseek-v3+mtp"])
@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_agreement_equal_transformers(name: str, packing: bool) -> None:
    """Also the logits: within 1e-4 of their scale at every place that has a target."""
    samples, reference = make_samples(name, _COUNT), _Reference(name)
    with trainer_of(name, _config(name, trainer=_trained(packing=packing))) as trainer:
        found = _draft_logits(trainer, samples)
        metrics = trainer.train_step(samples)
    loss = agreed = weights = targets = 0.0
    for sample, ours in zip(samples, found, strict=True):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        start = len(tokens) - sample.response_length
        with torch.no_grad():
            main, draft = reference.logits(tokens)
        torch.testing.assert_close(ours[: len(draft)], draft, atol=1e-4 * float(draft.abs().max()), rtol=0)
        for j in range(start, len(tokens)):
            weight = float(sample.loss_weights[j - start])
            if j >= 2 and sample.loss_mask[j - start]:
                log_probs = (draft[j - 2] / _TEMPERATURE).log_softmax(-1)
                loss -= weight * float(log_probs[tokens[j]])
                agreed += weight * float(draft[j - 2].argmax() == main[j - 1].argmax())
                weights += weight
                targets += 1
    assert metrics["train/mtp_1_targets"] == targets > 0
    assert metrics["train/mtp_1_loss"] == pytest.approx(loss / weights, rel=1e-4)
    assert metrics["train/mtp_1_agreement"] == pytest.approx(agreed / weights, rel=1e-4)


def _draft_logits(trainer: MegatronTrainer, samples: list[TrainSample]) -> list[Tensor]:
    """The MTP layer's logits at every token of each sample, [T, V]."""
    model = trainer._model
    (micro_batch,) = trainer._batches.cut(samples)
    with torch.no_grad():
        (state,) = model.draft_states(micro_batch, model.run(micro_batch), detach=True)
        logits = state @ model.output_weight().T  # [S, B, V]
    lengths = [len(samples[i].tokens) for i in micro_batch.samples]
    if micro_batch.packed is not None:
        found = list(logits[: sum(lengths), 0].split(lengths))
    else:
        found = [logits[:length, row] for row, length in enumerate(lengths)]
    return [found[micro_batch.samples.index(i)] for i in range(len(samples))]


def test_the_policy_is_bit_equal_with_and_without() -> None:
    """Gradients in the first step, weights and metrics after three, although gradients are clipped."""
    samples, mtp = make_samples(_GLM, _COUNT), "mtp."
    results = []
    for scale in (0.0, _SCALE):
        config = _config(_GLM, trainer={"mtp_loss_scale": scale, "optimizer": {"lr": 1e-2, "clip_grad": 0.1}})
        with trainer_of(_GLM, config) as trainer:
            metrics = [trainer.train_step(samples)]
            parameters = trainer._model.named_parameters()
            gradients = {n: p.main_grad.clone() for n, p in parameters if not n.startswith(mtp)}
            metrics += [trainer.train_step(samples) for _ in range(2)]
            results.append((gradients, weight_digests(trainer), metrics))
    (plain, weights, metrics), (beside, weights_beside, metrics_beside) = results
    assert plain.keys() == beside.keys()
    for name, gradient in plain.items():
        assert gradient.equal(beside[name]), name
    for step, step_beside in zip(metrics, metrics_beside, strict=True):
        assert step == {name: value for name, value in step_beside.items() if "mtp" not in name}
        assert step["train/grad_norm"] > 0.1  # it was clipped
    moved = {name for name in weights if weights[name] != weights_beside[name]}
    shared = ("embed_tokens.weight", "shared_head.head.weight", "e_score_correction_bias")
    of_layer = {n for n in weights if n.startswith("model.layers.2.") and not n.endswith(shared)}
    assert moved <= of_layer
    assert {n for n in of_layer - moved if ".experts." not in n} == set()  # an expert that no token chose may stay


def test_a_head_that_is_not_detached_moves_the_policy() -> None:
    samples, weights = make_samples(_GLM, _COUNT), []
    for detach in (True, False):
        with trainer_of(_GLM, _config(_GLM, trainer=_trained(mtp_detach=detach))) as trainer:
            trainer.train_step(samples)
            weights.append(weight_digests(trainer))
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert weights[0][name] != weights[1][name]


def test_gradients_of_the_layer_equal_autograd() -> None:
    """eh_proj, against the same loss through transformers' modules; trunk, embedding and head as constants."""
    samples, reference = make_samples(_GLM, _COUNT), _Reference(_GLM)
    with trainer_of(_GLM, _config(_GLM, trainer=_trained(optimizer={"clip_grad": 0}))) as trainer:
        trainer.train_step(samples)
        found = trainer._model.mtp.layers[0].eh_proj.weight.main_grad.clone()
    weight = reference.weights["eh_proj"].requires_grad_()
    loss = torch.zeros([])
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        rows = (reference.logits(tokens)[1] / _TEMPERATURE).log_softmax(-1)
        for j in range(max(len(tokens) - sample.response_length, 2), len(tokens)):
            loss -= _SCALE * float(sample.loss_weights[j - len(tokens)]) * rows[j - 2, tokens[j]]
    (expected,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_training_raises_agreement() -> None:
    """From a draft that knows nothing to one that says what the policy says, both learning the same answers."""
    samples = make_samples(_GLM, _COUNT)
    config = _config(
        _GLM,
        trainer=_trained(optimizer={"lr": 1e-2}),
        algorithm={"policy_loss": "sft", "advantage_estimator": "none"},
        rollout={"batch_size": _COUNT, "n_samples_per_prompt": 1, "sampling": {"temperature": 1.0}},
    )
    with trainer_of(_GLM, config) as trainer:
        steps = [trainer.train_step(samples) for _ in range(60)]
    assert steps[0]["train/mtp_1_agreement"] < 0.3
    assert steps[-1]["train/mtp_1_agreement"] > 0.9
    assert steps[-1]["train/mtp_1_loss"] < 0.2 * steps[0]["train/mtp_1_loss"]


_COMPARED = ("mtp_1_loss", "mtp_1_agreement", "mtp_1_targets", "mtp_grad_norm", "grad_norm", "loss")


def _steps(trainer: MegatronTrainer, samples: list[TrainSample]) -> list[dict[str, float]]:
    steps = [trainer.train_step(samples) for _ in range(2)]
    return [{name: step[f"train/{name}"] for name in _COMPARED} for step in steps]


@pytest.fixture(scope="module")
def whole() -> list[dict[str, float]]:
    """One rank, one padded micro-batch."""
    with trainer_of(_GLM, _config(_GLM, trainer=_trained(packing=False))) as trainer:
        return _steps(trainer, make_samples(_GLM, _COUNT))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 6])
def test_micro_batches_and_packing_change_nothing(
    whole: list[dict[str, float]], packing: bool, micro_batch_size: int
) -> None:
    config = _config(_GLM, trainer=_trained(packing=packing, micro_batch_size=micro_batch_size))
    with trainer_of(_GLM, config) as trainer:
        _check_steps(_steps(trainer, make_samples(_GLM, _COUNT)), whole)


@pytest.mark.parametrize(
    "parallel",
    [
        {"expert": 2},
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda parallel: next(iter(parallel)),
)
def test_parallel_layouts_change_nothing(whole: list[dict[str, float]], parallel: dict[str, int]) -> None:
    config = _config(_GLM, trainer=_trained(num_ranks=2, parallel=parallel, micro_batch_size=3))
    for steps in on_ranks(_GLM, config, _steps, make_samples(_GLM, _COUNT)):
        _check_steps(steps, whole)


def _check_steps(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for step, reference in zip(found, expected, strict=True):
        assert step == pytest.approx(reference, rel=1e-4)


def test_recomputation_trains_the_layer_too() -> None:
    results = []
    for recompute in (False, True):
        with trainer_of(_GLM, _config(_GLM, trainer=_trained())) as trainer:
            if recompute:
                config = trainer._model.config
                config.recompute_granularity, config.recompute_method, config.recompute_num_layers = (
                    "full",
                    "uniform",
                    1,
                )
            results.append(_steps(trainer, make_samples(_GLM, _COUNT)))
    assert results[0] == results[1]


def test_a_checkpoint_without_mtp_layers_is_refused() -> None:
    config = _config("glm4-moe", trainer=_trained())
    with pytest.raises(ValueError, match=r"trainer\.mtp_loss_scale 0\.2.*holds none"), trainer_of("glm4-moe", config):
        pass
