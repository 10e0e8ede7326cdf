"""Which rank takes which samples, and in which micro-batch.

All ranks know the whole batch and compute the same plan, so nothing is communicated.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatchPlan:
    """One forward pass of one rank."""

    samples: tuple[int, ...]  # positions in the batch; may be empty on some ranks of an uneven batch
    rows: int  # largest number of samples any rank takes in this pass
    row_length: int  # longest sample any rank takes in this pass, in tokens
    total_length: int  # largest sum of tokens any rank takes in this pass


def plan_micro_batches(
    lengths: Sequence[int], *, data_size: int, micro_batch_size: int
) -> list[tuple[MicroBatchPlan, ...]]:
    """Cuts a batch into micro-batches: entry [i][r] is the i-th pass of data-parallel rank r.

    Samples are sorted by length, and each run of `data_size * micro_batch_size` of them makes one pass, in which the
    next-longest sample goes to the rank with the fewest tokens so far. So every rank makes the same number of passes,
    ranks have equal work to within one sample, and a pass holds samples of similar length. The result depends on the
    lengths alone. Only the last pass may hold fewer samples.

    Args:
        lengths: tokens of each sample.
        data_size: data-parallel ranks.
        micro_batch_size: samples of one pass on one rank.

    Raises:
        ValueError: the batch is empty.
    """
    if not lengths:
        raise ValueError("a batch needs at least one sample, found none")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    load = [0] * data_size
    passes = []
    for start in range(0, len(order), data_size * micro_batch_size):
        taken: list[list[int]] = [[] for _ in range(data_size)]
        for sample in order[start : start + data_size * micro_batch_size]:
            free = [r for r in range(data_size) if len(taken[r]) < micro_batch_size]
            rank = min(free, key=lambda r: (load[r], r))
            taken[rank].append(sample)
            load[rank] += lengths[sample]
        shape = {
            "rows": max(len(t) for t in taken),
            "row_length": max(lengths[i] for t in taken for i in t),
            "total_length": max(sum(lengths[i] for i in t) for t in taken),
        }
        passes.append(tuple(MicroBatchPlan(tuple(t), **shape) for t in taken))
    return passes
