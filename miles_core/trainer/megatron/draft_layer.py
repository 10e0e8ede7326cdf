"""megatron-core's multi-token-prediction layer, fed by us."""

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from miles_core.trainer.megatron.packing import PackedSequences, next_tokens


class DraftLayer(MultiTokenPredictionLayer):
    """hidden'_t = norm(layer(eh_proj([enorm(embedding of token t + depth), hnorm(hidden_t)]))): DeepSeek-V3 (arXiv
    2412.19437), section 2.2.

    megatron-core shifts tokens sequence by sequence in a Python loop, which on a GPU waits for every single one.
    """

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: None,
        embedding: Callable[[Tensor], Tensor],
        hidden_states: Tensor,
        packed_seq_params: PackedSequences | None = None,
    ) -> tuple[Tensor, None, Tensor, Tensor]:
        """Tokens [B, S] of the layer before (t + depth - 1 at place t) -> those of this one, and their embeddings."""
        following = next_tokens(input_ids, packed_seq_params)
        return following, position_ids, embedding(following), hidden_states

    def _checkpointed_forward(self, forward_func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """megatron-core's own takes no packed sequences, and gives parameters no gradient where no input needs one."""
        return checkpoint(forward_func, *args, use_reentrant=False, **kwargs)
