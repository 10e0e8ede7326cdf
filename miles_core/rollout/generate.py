"""From prompts to scored groups: requests to the engine, completions to samples, samples to rewards."""

from collections.abc import Callable, Sequence

import numpy as np

from miles_core.config.run import RunConfig
from miles_core.rollout.engine import Completion, GenerateRequest, SamplingParams
from miles_core.seeds import derive_seed
from miles_core.types import Prompt, Sample, SampleGroup, SampleStatus

Generate = Callable[[Sequence[GenerateRequest]], list[Completion]]
Decode = Callable[[np.ndarray], str]

_STATUS = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}


def sampling_params(config: RunConfig, stop_token_ids: Sequence[int]) -> SamplingParams:
    """The rollout's sampling; `stop_token_ids` are the tokenizer's end-of-sequence tokens."""
    s = config.rollout.sampling
    return SamplingParams(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        max_new_tokens=s.max_new_tokens,
        stop_token_ids=tuple(sorted({*s.stop_token_ids, *stop_token_ids})),
    )


def generate_groups(
    prompts: Sequence[Prompt],
    *,
    first_group_index: int,
    n_samples_per_prompt: int,
    sampling: SamplingParams,
    seed: int,
    generate: Generate,
    decode: Decode,
) -> list[list[Sample]]:
    """Unscored samples, one list a prompt, in the order of the prompts.

    A sample's seed depends on the run's seed and the sample's index alone, so neither the number of engines nor the
    order in which they finish changes a response. Raises ValueError when the engine's answer does not fit the request.
    """
    requests = [
        GenerateRequest(
            request_id=str(index),
            prompt_ids=prompt.token_ids,
            sampling=sampling,
            seed=derive_seed(seed, "sample", index),
        )
        for position, prompt in enumerate(prompts)
        for index in _sample_indices(first_group_index + position, n_samples_per_prompt)
    ]
    completions = generate(requests)
    if [c.request_id for c in completions] != [r.request_id for r in requests]:
        raise ValueError(f"engine answered {len(completions)} requests of {len(requests)}, or in another order")
    groups = []
    for position, prompt in enumerate(prompts):
        group_index = first_group_index + position
        start = position * n_samples_per_prompt
        answers = completions[start : start + n_samples_per_prompt]
        groups.append([_to_sample(prompt, group_index, answer, decode) for answer in answers])
    return groups


def _sample_indices(group_index: int, n_samples: int) -> range:
    return range(group_index * n_samples, (group_index + 1) * n_samples)


def _to_sample(prompt: Prompt, group_index: int, answer: Completion, decode: Decode) -> Sample:
    length = len(answer.output_ids)
    if len(answer.log_probs) != length:
        raise ValueError(
            f"sample {answer.request_id}: engine returned {len(answer.log_probs)} log-probs for {length} tokens"
        )
    return Sample(
        group_index=group_index,
        index=int(answer.request_id),
        prompt_index=prompt.index,
        tokens=np.concatenate([prompt.token_ids, answer.output_ids]).astype(np.int32),
        response_length=length,
        response=decode(answer.output_ids),
        status=_STATUS[answer.finish_reason],
        loss_mask=np.ones(length, dtype=np.uint8),
        rollout_log_probs=answer.log_probs,
        weight_versions=answer.weight_versions,
        routed_experts=answer.routed_experts,
    )


def rollout_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Metrics of one rollout under miles' names. Samples whose scorer failed count in no reward metric."""
    samples = [s for g in groups for s in g.samples]
    rewards = np.array([s.reward for s in samples if s.reward is not None], dtype=np.float64)
    lengths = np.array([s.response_length for s in samples], dtype=np.float64)
    spread = [np.ptp([s.reward for s in g.samples if s.reward is not None] or [0.0]) for g in groups]
    return {
        "rollout/raw_reward": float(rewards.mean()) if len(rewards) else float("nan"),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/response_len/min": float(lengths.min()),
        "rollout/truncated_ratio": sum(s.status is SampleStatus.TRUNCATED for s in samples) / len(samples),
        "rollout/failed_samples": float(sum(s.status is SampleStatus.FAILED for s in samples)),
        "rollout/zero_std": sum(x == 0 for x in spread) / len(groups),
        "rollout/log_probs": float(np.mean(np.concatenate([s.rollout_log_probs for s in samples]))),
    }
