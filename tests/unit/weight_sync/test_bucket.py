"""Buckets: what goes in comes out, in whole tensors, at bounded size."""

import hashlib

import numpy as np
import pytest
import torch

from miles_core.weight_sync.bucket import bucketize, tensor_digest

TENSORS = [
    ("fp32", torch.randn(3, 5)),
    ("bf16", torch.randn(7).bfloat16()),
    ("fp8", torch.randn(4, 4).to(torch.float8_e4m3fn)),
    ("packed", torch.arange(9, dtype=torch.int32)),
    ("shape", torch.tensor([3, 4])),
    ("scalar", torch.tensor(2.5)),
    ("transposed", torch.randn(6, 2).T),
    ("gradient", torch.nn.Parameter(torch.randn(2, 2))),
]


@pytest.mark.parametrize("bucket_bytes", [1, 1024, 10_000])
@pytest.mark.parametrize("writeable", [True, False])
def test_tensors_come_back_equal_and_in_order(bucket_bytes: int, writeable: bool) -> None:
    buckets = list(bucketize(TENSORS, bucket_bytes))
    for bucket in buckets:
        bucket.data.setflags(write=writeable)  # other processes see buckets as read-only shared memory
    unpacked = [named for bucket in buckets for named in bucket.tensors()]
    assert [name for name, _ in unpacked] == [name for name, _ in TENSORS]
    for (_, sent), (_, received) in zip(TENSORS, unpacked, strict=True):
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert tensor_digest(received) == tensor_digest(sent)


def test_buckets_are_full_but_not_too_full() -> None:
    tensors = [(str(i), torch.zeros(n, dtype=torch.uint8)) for i, n in enumerate([10, 500, 600, 5000, 1, 1])]
    buckets = list(bucketize(tensors, 1024))  # each tensor takes whole rows of 512 bytes
    assert [[spec.name for spec in bucket.specs] for bucket in buckets] == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert [bucket.data.nbytes for bucket in buckets] == [1024, 1024, 5120, 1024]


def test_nothing_gives_no_bucket() -> None:
    assert list(bucketize([], 64)) == []


def test_digest_is_sha256_of_dtype_shape_and_bytes() -> None:
    values = np.array([[1.0, 2.0]], dtype=np.float32)
    expected = hashlib.sha256(b"torch.float32(1, 2)" + values.tobytes()).hexdigest()
    assert tensor_digest(torch.from_numpy(values)) == expected


@pytest.mark.parametrize(
    "other",
    [torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 2.0000002]]), torch.tensor([[1.0, 2.0]]).view(torch.int32)],
    ids=["shape", "last bit", "dtype"],
)
def test_digest_tells_tensors_apart(other: torch.Tensor) -> None:
    assert tensor_digest(torch.tensor([[1.0, 2.0]])) != tensor_digest(other)
