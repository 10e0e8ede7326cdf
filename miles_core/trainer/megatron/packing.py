"""A packed micro-batch as megatron-core passes it through its layers."""

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from miles_core.batching.micro_batch import PackedLayout


@dataclass
class PackedSequences(PackedSeqParams):
    """`PackedSeqParams` (rotary embedding reads it) with the indices that our attention needs."""

    layout: PackedLayout | None = None


def packed_sequences(layout: PackedLayout | None) -> PackedSequences | None:
    """None for a padded micro-batch."""
    if layout is None:
        return None
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=layout.offsets,
        cu_seqlens_kv=layout.offsets,
        max_seqlen_q=layout.longest,
        max_seqlen_kv=layout.longest,
        layout=layout,
    )


def next_tokens(tokens: Tensor, packed: PackedSequences | None) -> Tensor:
    """Tokens [B, S] -> at each place the token after it in the same sequence, 0 at a sequence's end."""
    following = tokens.roll(-1, dims=1)
    if packed is None:
        following[:, -1] = 0
    else:
        assert packed.layout is not None
        following[:, packed.layout.offsets[1:].long() - 1] = 0
    return following


def to_rows(packed: Tensor, layout: PackedLayout) -> Tensor:
    """[total, ...] -> [n, longest, ...], zeros after a sequence's end."""
    shape = (layout.count, layout.longest)
    if len(packed) == layout.count * layout.longest:
        return packed.unflatten(0, shape)
    rows = packed.new_zeros(layout.count * layout.longest, *packed.shape[1:])
    return rows.index_copy(0, layout.places, packed).unflatten(0, shape)


def from_rows(rows: Tensor, layout: PackedLayout) -> Tensor:
    """The inverse of `to_rows`."""
    flat = rows.flatten(0, 1)
    return flat if len(flat) == len(layout.places) else flat.index_select(0, layout.places)
