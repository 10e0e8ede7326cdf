"""Where prompts and rewards come from."""

from typing import Any, Literal

from pydantic import Field, model_validator

from miles_core.config.base import Section


class TaskConfig(Section):
    """A task whose prompts are generated and whose answers are scored by its own rule, in [0, 1]."""

    name: str = "sort_digits"
    """`sort_digits`, or `reasoning_gym/NAME` for a data set of the reasoning-gym package."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the generator (`num_digits` for sort_digits; the data set's own for reasoning_gym)."""
    train_size: int = Field(512, ge=1)
    """Number of training prompts."""
    eval_size: int = Field(64, ge=1)
    """Number of held-out prompts; none of them is among the training prompts."""
    seed: int = Field(0, ge=0)
    """Seed of the generator."""


class DataConfig(Section):
    """What is trained on: exactly one of `task`, `prompts` and `conversations`.

    Supervised fine-tuning takes any of them: whole conversations, or prompts whose label is the answer to learn.
    """

    task: TaskConfig | None = None
    """Generated prompts."""
    prompts: str | None = None
    """JSONL file of training prompts."""
    conversations: str | None = None
    """JSONL file of whole conversations for supervised fine-tuning: chat messages under `messages`, schemas of tools,
    if any, under `tools`. What the assistant says is learned."""
    max_conversation_length: int | None = Field(None, ge=2)
    """Supervised fine-tuning: longer conversations (in tokens) are cut; null takes the longest sequence that the model
    takes."""
    eval_prompts: str | None = None
    """JSONL file of held-out prompts, which the evaluation scores; needed with `prompts` and `conversations`."""
    input_key: str = "input"
    """Field that holds the prompt: a string, or a list of chat messages."""
    label_key: str | None = "label"
    """Field that holds the reference answer, or null when rows have none."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template; a plain string becomes one user message."""
    system_prompt: str | None = None
    """System message put before each prompt; needs `apply_chat_template`."""
    max_prompt_length: int = Field(1024, ge=1)
    """Longer prompts (in tokens) are dropped and counted."""
    shuffle: bool = True
    """Permute the prompts anew in each epoch, by the run's seed and the epoch."""

    @model_validator(mode="after")
    def _one_source(self) -> "DataConfig":
        found = [name for name in ("task", "prompts", "conversations") if getattr(self, name) is not None]
        if len(found) != 1:
            raise ValueError(
                "exactly one of data.task, data.prompts and data.conversations must be set, found "
                f"{' and '.join(found) or 'none'}"
            )
        if self.system_prompt is not None and not self.apply_chat_template:
            raise ValueError("data.system_prompt needs data.apply_chat_template=true")
        return self


class RewardConfig(Section):
    """How a response becomes a number."""

    type: Literal["task", "exact_match", "math", "boxed_math", "function"] = "task"
    """task: the generated task's own scorer. exact_match: response equals label after trimming. math: symbolic equality
    with the label. boxed_math: the same for the last \\boxed{...}. function: `function` below."""
    function: str | None = None
    """`package.module:name` of a function (prompt, response, label, metadata) -> float, for type=function."""
    failure_tolerance: int = Field(0, ge=0)
    """Samples per rollout whose scorer may fail; they are left out and counted. More end the run with the first
    error."""

    @model_validator(mode="after")
    def _function_given(self) -> "RewardConfig":
        if (self.type == "function") != (self.function is not None):
            raise ValueError(f"reward.function belongs to reward.type=function, found type={self.type!r}")
        return self
