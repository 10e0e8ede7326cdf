"""Which options go together with which algorithm, and what is warned of."""

from typing import Any

import pytest
from pydantic import ValidationError

from miles_core.config.run import RunConfig

SFT = {"advantage_estimator": "none", "policy_loss": "sft"}
ONE = {"n_samples_per_prompt": 1}
FILES = {"reward": {"type": "exact_match"}}


def run(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"random": {}}, "data": {"task": {}}} | sections)


def chat(**data: Any) -> dict[str, Any]:
    return FILES | {"data": {"conversations": "chat.jsonl", "eval_prompts": "e.jsonl"} | data}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"prompts": "p", "conversations": "c"}}, "found prompts and conversations"),
        ({"data": {}}, "must be set, found none"),
        (chat(), "data.conversations holds answers to learn: set algorithm.policy_loss=sft"),
        (chat(eval_prompts=None) | {"algorithm": SFT, "rollout": ONE}, "data.conversations needs data.eval_prompts"),
        ({"trainer": {"qat": True}}, "trainer.qat=true trains for an INT4 rollout, found quantize.format=none"),
        ({"trainer": {"fp8": True, "qat": True}}, "trainer.fp8=true and trainer.qat=true: a weight has one rounding"),
        ({"trainer": {"mtp_detach": False}}, "trainer.mtp_detach=false has no effect with trainer.mtp_loss_scale 0"),
        (
            {"trainer": {"mtp_loss_scale": 0.2, "num_ranks": 2, "parallel": {"context": 2}}},
            "trainer.mtp_loss_scale 0.2 with trainer.parallel.context 2",
        ),
        (
            {"trainer": {"mtp_loss_scale": 0.2, "distributed_optimizer": True}},
            "trainer.distributed_optimizer=true with trainer.mtp_loss_scale 0.2",
        ),
        ({"algorithm": SFT}, "policy_loss=sft needs rollout.n_samples_per_prompt=1, found 8"),
        (
            {"algorithm": SFT, "rollout": ONE | {"sampling": {"temperature": 0.5}}},
            "policy_loss=sft learns at temperature 1, found rollout.sampling.temperature 0.5",
        ),
        (
            {"algorithm": SFT, "rollout": ONE | {"dynamic_sampling": True}},
            "rollout.dynamic_sampling=true has no effect on policy_loss=sft",
        ),
        (
            {
                "algorithm": SFT,
                "rollout": ONE,
                "data": {"prompts": "p", "eval_prompts": "e", "label_key": None},
                "reward": {"type": "function", "function": "a:b"},
            },
            "policy_loss=sft on data.prompts learns the labels as answers: set data.label_key",
        ),
        ({"algorithm": {"critic_warmup_rollouts": 1}}, "critic_warmup_rollouts 1 has no effect without ppo"),
        (
            {"algorithm": {"advantage_estimator": "ppo", "critic_warmup_rollouts": 3}, "rollout": {"num_rollout": 3}},
            "algorithm.critic_warmup_rollouts 3 leaves none of rollout.num_rollout 3 to the policy",
        ),
        ({"trainer": {"critic_optimizer": {}}}, "trainer.critic_optimizer has no effect on grpo: ppo has a critic"),
        ({"algorithm": {"overlong_buffer": 257}}, "algorithm.overlong_buffer 257 is longer than rollout.sampling"),
        ({"algorithm": {"distill_kl_coef": 1}}, "need distillation.teachers, found none"),
        ({"distillation": {"teachers": ["a"]}}, "distillation.teachers names 1 that nothing asks"),
        (
            {"algorithm": {"distill_top_k_coef": 1}, "distillation": {"teachers": ["a", "b"]}},
            "algorithm.distill_top_k_coef takes one teacher, found 2 in distillation.teachers",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as found:
        run(**sections)
    assert message in str(found.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": SFT, "rollout": ONE},
        chat() | {"algorithm": SFT, "rollout": ONE},
        {"algorithm": {"advantage_estimator": "ppo", "critic_warmup_rollouts": 3}},
        {"algorithm": {"distill_kl_coef": 1}, "distillation": {"teachers": ["a", "b"]}},
        {"algorithm": SFT | {"distill_top_k_coef": 1}, "rollout": ONE, "distillation": {"teachers": ["a"]}},
    ],
)
def test_options_that_go_together(sections: dict[str, Any]) -> None:
    assert run(**sections).warnings() == []


STEPS = {"trainer": {"global_batch_size": 32}}
FP8 = {"quantize": {"format": "fp8"}}


@pytest.mark.parametrize(
    ("sections", "warned_of"),
    [
        (STEPS, ["makes 4 optimizer steps of a rollout"]),
        (FP8, ["quantize.format=fp8: the rollout's model is not quite the trained one"]),
        (STEPS | FP8, ["makes 4 optimizer steps", "quantize.format=fp8"]),
        (STEPS | {"algorithm": {"opsm_delta": 1e-4}}, []),
        (STEPS | FP8 | {"algorithm": {"off_policy": {"method": "tis"}}}, []),
        (FP8 | {"algorithm": SFT, "rollout": ONE}, []),
    ],
)
def test_off_policy_runs_without_a_correction_are_warned_of(sections: dict[str, Any], warned_of: list[str]) -> None:
    warnings = run(**sections).warnings()
    assert len(warnings) == len(warned_of)
    for warning, expected in zip(warnings, warned_of, strict=True):
        assert expected in warning
