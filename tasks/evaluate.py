"""evaluate: what a model scores on held-out prompts, through the rollout engine."""

from pathlib import Path
from typing import Any

from miles_core.config.run import RunConfig
from tasks.named_files import data_and_reward
from tasks.stage import StageJob, StageResult, StageSpec, in_work_dir


def reads(config: RunConfig) -> dict[str, Any]:
    """Everything that a score depends on besides the model."""
    return {
        **data_and_reward(config, "eval"),
        "evaluate": config.evaluate.model_dump(mode="json"),
        "max_new_tokens": config.rollout.sampling.max_new_tokens,
        "engine": config.rollout.engine,
        "exact": config.trainer.exact,
        "seed": config.seed,
    }


def evaluate(job: StageJob, out: Path) -> StageResult:
    """Scores the input `model`; the account is the report."""
    import miles_core.evaluation as evaluation

    report = evaluation.evaluate(job.config, job.fetch("model"), out, job.progress)
    return StageResult(report, {"report": evaluation.REPORT_FILE, "samples": evaluation.SAMPLES_FILE})


EVALUATE = StageSpec("evaluate", kind="evaluation", version=1, reads=reads, run=in_work_dir(evaluate))
