"""Scores a model on held-out prompts through the rollout engine."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.config.run import RunConfig
from miles_core.types import SampleGroup, SampleStatus

REPORT_FILE = "evaluation.json"
SAMPLES_FILE = "samples.jsonl"
_PROMPTS_PER_CALL = 32


@dataclass(frozen=True)
class EvaluationReport:
    """What a model scored. Fractions are of 1, lengths in tokens."""

    prompts: int
    samples: int
    mean_reward: float
    accuracy: float  # share of responses whose reward reaches evaluate.pass_threshold
    pass_at_k: dict[str, float]  # unbiased estimate over n samples a prompt, for k = 1, 2, 4, ... n
    response_length_mean: float
    response_length_max: int
    truncated_ratio: float
    failed_samples: int


def evaluate(
    config: RunConfig, model_folder: Path, report_dir: Path, progress: Callable[[int, int, str], None]
) -> dict[str, Any]:
    """Writes evaluation.json and samples.jsonl into `report_dir` and returns the report as a dictionary.

    `model_folder` is a Hugging Face folder; the report depends on it, on the held-out prompts and on `config.evaluate`
    alone.
    """
    from miles_core.data.dataset import load_prompts
    from miles_core.data.tokenization import load_tokenizer
    from miles_core.rewards import build_scorer
    from miles_core.rollout.engine import SamplingParams
    from miles_core.rollout.factory import build_engine
    from miles_core.rollout.generate import generate_groups

    tokenizer = load_tokenizer(model_folder)
    prompts = load_prompts(config, tokenizer, split="eval").prompts
    settings = config.evaluate
    sampling = SamplingParams(
        temperature=settings.temperature,
        max_new_tokens=settings.max_new_tokens or config.rollout.sampling.max_new_tokens,
        stop_token_ids=tuple(tokenizer.stop_token_ids),
    )
    engine, score = build_engine(config, model_folder), build_scorer(config, prompts)
    groups: list[SampleGroup] = []
    try:
        for start in range(0, len(prompts), _PROMPTS_PER_CALL):
            progress(start, len(prompts), "evaluate")
            answers = generate_groups(
                prompts[start : start + _PROMPTS_PER_CALL],
                first_group_index=start,
                n_samples_per_prompt=settings.n_samples_per_prompt,
                sampling=sampling,
                seed=config.seed,
                generate=engine.generate,
                decode=tokenizer.decode,
            )
            groups += score(answers)[0]
    finally:
        engine.close()
    progress(len(prompts), len(prompts), "evaluate")
    report = asdict(summarize(groups, settings.pass_threshold))
    report_dir.mkdir(parents=True, exist_ok=True)
    (report_dir / REPORT_FILE).write_text(json.dumps(report, indent=1))
    texts = {prompt.index: prompt for prompt in prompts}
    with (report_dir / SAMPLES_FILE).open("w") as file:
        for sample in (s for group in groups for s in group.samples):
            prompt = texts[sample.prompt_index]
            row = {"prompt": prompt.text, "response": sample.response, "label": prompt.label, "reward": sample.reward}
            file.write(json.dumps(row, default=str) + "\n")
    return report


def summarize(groups: Sequence[SampleGroup], pass_threshold: float) -> EvaluationReport:
    """The report of scored groups. Samples whose scorer failed count as wrong, and are counted."""
    samples = [s for group in groups for s in group.samples]
    rewards = np.array([s.reward or 0.0 for s in samples])
    lengths = [s.response_length for s in samples]
    passed = [[(s.reward or 0.0) >= pass_threshold for s in group.samples] for group in groups]
    n = min(len(group) for group in passed)
    ks = [2**i for i in range(n.bit_length()) if 2**i <= n]
    return EvaluationReport(
        prompts=len(groups),
        samples=len(samples),
        mean_reward=float(rewards.mean()),
        accuracy=float(np.mean([ok for group in passed for ok in group])),
        pass_at_k={str(k): float(np.mean([pass_at_k(len(g), sum(g), k) for g in passed])) for k in ks},
        response_length_mean=float(np.mean(lengths)),
        response_length_max=max(lengths),
        truncated_ratio=sum(s.status is SampleStatus.TRUNCATED for s in samples) / len(samples),
        failed_samples=sum(s.status is SampleStatus.FAILED for s in samples),
    )


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples drawn without replacement hold a correct one: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", 2021.
    """
    return 1.0 - comb(n - correct, k) / comb(n, k)
