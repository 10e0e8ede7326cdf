"""Weights into a running SGLang server, through its update endpoints.

The tensors cross the process border as CUDA IPC handles of one flat buffer a bucket, so the server copies them on the
device. SGLang's own loader splits and fuses them as it does when it reads a checkpoint, draft layers included.
"""

from collections.abc import Sequence

import torch

from miles_core.device import current_device
from miles_core.rollout.sglang.client import post
from miles_core.weight_sync.bucket import WeightBucket, WeightSyncError


def push(url: str, buckets: Sequence[WeightBucket], version: int) -> None:
    """pause -> one call a bucket -> flush and version with the last -> continue.

    Requests in flight are put back in the server's queue and go on with the new weights. Raises WeightSyncError with
    the server's own message when it rejects a bucket.
    """
    post(url, "/pause_generation", {"mode": "retract"})
    try:
        _push_paused(url, buckets, version)
    finally:
        post(url, "/continue_generation", {})


def _push_paused(url: str, buckets: Sequence[WeightBucket], version: int) -> None:
    for number, bucket in enumerate(buckets):
        last = number + 1 == len(buckets)
        flat = torch.from_numpy(bucket.data).to(
            current_device()
        )  # must live until the answer: the server reads this memory
        body = {
            "serialized_named_tensors": [_serialize(flat, bucket)],
            "load_format": "flattened_bucket",
            "flush_cache": last,
            "abort_all_requests": False,
            "weight_version": str(version) if last else None,
        }
        answer = post(url, "/update_weights_from_tensor", body)
        if not answer.get("success"):
            raise WeightSyncError(f"SGLang rejected bucket {number + 1} of {len(buckets)}: {answer.get('message')}")


def _serialize(flat: torch.Tensor, bucket: WeightBucket) -> str:
    # Imported here: this module is read on machines that have no SGLang, by the tests of everything around it.
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    monkey_patch_torch_reductions()  # device handles by UUID, as the server expects them
    metadata = [
        FlattenedTensorMetadata(
            name=spec.name,
            shape=torch.Size(spec.shape),
            dtype=getattr(torch, spec.dtype),
            start_idx=spec.offset,
            end_idx=spec.offset + spec.nbytes,
            numel=spec.nbytes,
        )
        for spec in bucket.specs
    ]
    return MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": metadata}, output_str=True)
