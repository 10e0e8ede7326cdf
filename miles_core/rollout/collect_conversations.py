"""The supervised counterpart of a rollout: given answers instead of sampled ones."""

from typing import Any

import numpy as np

from miles_core.config.run import RunConfig
from miles_core.data.conversations import Conversation
from miles_core.data.source import PromptSource
from miles_core.observability.metrics import Metrics
from miles_core.types import Sample, SampleGroup, SampleStatus

_NOT_SAMPLED = -1  # as weight version


class ConversationCollector:
    """Hands out `rollout.batch_size` conversations a time, each as a group of one sample without a reward."""

    def __init__(self, config: RunConfig, source: PromptSource[Conversation]) -> None:
        self._batch_size, self._source = config.rollout.batch_size, source
        self._next_index = 0

    def collect(self) -> tuple[list[SampleGroup], Metrics]:
        """The next conversations; see `Collector`."""
        first = self._next_index
        samples = [_to_sample(c, first + i) for i, c in enumerate(self._source.next(self._batch_size))]
        self._next_index += self._batch_size
        lengths = [len(s.tokens) for s in samples]
        return [SampleGroup((s,)) for s in samples], {
            "rollout/total_len/mean": float(np.mean(lengths)),
            "rollout/total_len/max": float(max(lengths)),
            "rollout/epoch": float(self._source.epoch),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._source.state_dict(), "next_index": self._next_index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state["source"])
        self._next_index = state["next_index"]


def _to_sample(conversation: Conversation, index: int) -> Sample:
    """What comes before the first token to learn counts as the prompt; nothing can predict the very first token."""
    first = max(int(np.flatnonzero(conversation.loss_mask)[0]), 1)
    mask = conversation.loss_mask[first:]
    return Sample(
        group_index=index,
        index=index,
        prompt_index=conversation.index,
        tokens=conversation.token_ids,
        response_length=len(mask),
        response="",
        status=SampleStatus.COMPLETED,
        loss_mask=mask,
        rollout_log_probs=np.zeros(len(mask), dtype=np.float32),  # no engine sampled them, and no loss reads them
        weight_versions=np.full(len(mask), _NOT_SAMPLED, dtype=np.int32),
    )
