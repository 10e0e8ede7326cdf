"""The policy as a megatron-core GPTModel."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from miles_core.batching.micro_batch import MicroBatch
from miles_core.trainer.megatron.dispatch import use_indexed_dispatch
from miles_core.trainer.megatron.layer_spec import decoder_spec, mtp_spec
from miles_core.trainer.megatron.model_config import DecoderConfig, LatentDecoderConfig
from miles_core.trainer.megatron.packing import packed_sequences


class PolicyModel(GPTModel):
    """GPTModel that ends with the hidden states: logits are made for response tokens only, a chunk at a time.

    MTP layers are held and saved; where they are not trained they are frozen, and not run.
    """

    def __init__(
        self, config: DecoderConfig | LatentDecoderConfig, *, mtp_num_layers: int, train_mtp: bool = False
    ) -> None:
        geometry = config.geometry
        assert geometry is not None
        last_stage = parallel_state.is_pipeline_last_stage()
        tensor_size = config.tensor_model_parallel_size
        super().__init__(
            config=config,
            transformer_layer_spec=decoder_spec(config, geometry),
            # Tensor-parallel ranks hold equal parts of the vocabulary; what is padded on is cut off again everywhere.
            vocab_size=-(-geometry.vocab_size // tensor_size) * tensor_size,
            max_sequence_length=geometry.max_position,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=last_stage,
            share_embeddings_and_output_weights=geometry.tie_embeddings,
            position_embedding_type="none",  # our attention rotates, see rope.py
            mtp_block_spec=mtp_spec(geometry, mtp_num_layers) if mtp_num_layers and last_stage else None,
        )
        self.geometry = geometry
        if self.mtp_process:
            self.mtp.requires_grad_(train_mtp)
        _mark_split_weights(self)
        use_indexed_dispatch(self)

    def run(self, micro_batch: MicroBatch) -> Tensor:
        """Hidden states [S, B, hidden] of the decoder's last layer of this stage, final norm included on the last one.

        With sequence parallelism S is this rank's part.
        """
        return self(
            input_ids=micro_batch.tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=packed_sequences(micro_batch.packed),
        )

    def draft_states(self, micro_batch: MicroBatch, hidden: Tensor, *, detach: bool) -> list[Tensor]:
        """Hidden states of each MTP layer, like those of `run` that they start from; on the last pipeline stage.

        Args:
            detach: let no gradient into `hidden` and the embedding.
        """
        if detach:
            hidden = hidden.detach()

        def embedding(tokens: Tensor) -> Tensor:
            embedded = self.embedding(input_ids=tokens, position_ids=None)
            return embedded.detach() if detach else embedded

        states = self.mtp(
            input_ids=micro_batch.tokens,
            position_ids=None,
            hidden_states=hidden,
            attention_mask=None,
            packed_seq_params=packed_sequences(micro_batch.packed),
            embedding=embedding,
        )
        return list(states.chunk(1 + len(self.mtp.layers)))[1:]

    def draft_parameters(self) -> list[nn.Parameter]:
        """Those of the MTP layers; on ranks that hold none, an empty list."""
        return list(self.mtp.parameters()) if self.mtp_process else []

    def output_inputs(self, hidden: Tensor) -> Tensor:
        """Hidden states [S * B, hidden], whole on each tensor-parallel rank, to be multiplied with `output_weight`."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return hidden.flatten(0, 1)

    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer, [vocabulary / tensor-parallel size, hidden]."""
        return self.shared_embedding_or_output_weight() if self.geometry.tie_embeddings else self.output_layer.weight

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        hidden, *rest = super()._preprocess(*args, **kwargs)
        if hidden is not None and self.geometry.embedding_scale != 1:
            hidden = hidden * torch.tensor(self.geometry.embedding_scale, dtype=hidden.dtype)
        return hidden, *rest

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def _mark_split_weights(model: torch.nn.Module) -> None:
    """Tells megatron-core which weights differ between tensor-parallel ranks, as its random initialization does.

    The gradient norm counts the others once.
    """
    axes = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        for kind, axis in axes.items():
            if isinstance(module, kind) and module.weight is not None:
                set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=axis, stride=1)
