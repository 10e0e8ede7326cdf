"""The narrow waist between the loop and whatever generates: SGLang, or the embedded engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from miles_core.weight_sync.bucket import WeightBucket
from miles_core.weight_sync.sender import PushReceiver


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. `temperature` 0 is greedy; log-probs are then those at temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerateRequest:
    """One response to sample. The result depends on this value and on the weights alone, not on what it is
    batched with, up to rounding of matrix products."""

    request_id: str
    prompt_ids: np.ndarray  # int32 [P]
    sampling: SamplingParams
    seed: int  # 64 bits, of this request alone


@dataclass(frozen=True)
class Completion:
    """The answer to a `GenerateRequest`."""

    request_id: str
    output_ids: np.ndarray  # int32 [N], the stop token included
    log_probs: np.ndarray  # float32 [N], of the logits divided by the temperature, before top-p and top-k
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: np.ndarray  # int32 [N]
    routed_experts: np.ndarray | None = None  # int16 [P + N - 1, layers, top_k]


class WeightsNeededError(RuntimeError):
    """An engine was started anew and has the weights that lie on disk: push to it, then ask again for what it did not
    answer. `completions` are the answers that it gave."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        super().__init__("the engine was started anew and needs the weights pushed last")
        self.completions = list(completions)


class RolloutEngine(Protocol):
    """An engine holds one model and serves requests. Not thread-safe unless an implementation says so."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Answers in the order of the requests. Raises `WeightsNeededError` where weights were lost that did not come
        by `update_weights`."""
        ...

    def update_weights(self, buckets: Sequence[WeightBucket], version: int) -> None:
        """Replaces every tensor, or none: raises `WeightSyncError` and keeps serving the old version when a tensor is
        missing, unknown, given twice or of another shape or dtype."""
        ...

    def push_receiver(self) -> PushReceiver:
        """The engine's end of pushes that do not go through memory of the host."""
        ...

    def weight_version(self) -> int:
        """Version of the weights now served; 0 is what was loaded from disk."""
        ...

    def weight_digests(self) -> dict[str, str]:
        """sha256 of each tensor as the engine holds it, by Hugging Face name."""
        ...

    def close(self) -> None:
        """Frees everything. Further calls are errors."""
        ...
