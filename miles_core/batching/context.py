"""A context-parallel rank's part of a micro-batch."""

from dataclasses import replace

from miles_core.batching.micro_batch import MicroBatch


def context_part(micro_batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """The tokens [B, S / size] of one stretch of the sequence, with what stands at them.

    Values of response tokens stay whole, because losses look at whole sequences; `scored` says which of them the
    hidden states of this stretch score. The layout of packed sequences stays whole for attention.
    """
    if size == 1:
        return micro_batch
    rows, length = micro_batch.tokens.shape
    assert length % size == 0, "build_micro_batch rounds the length up"
    stretch = length // size
    first, end = rank * stretch * rows, (rank + 1) * stretch * rows  # flat: column * rows + row
    positions, routes = micro_batch.logit_positions, micro_batch.routed_experts
    scored = ((positions >= first) & (positions < end)).nonzero().flatten()
    return replace(
        micro_batch,
        tokens=micro_batch.tokens[:, rank * stretch : (rank + 1) * stretch].contiguous(),
        scored=scored,
        logit_positions=positions[scored] - first,
        routed_experts=None if routes is None else routes[first:end],
    )
