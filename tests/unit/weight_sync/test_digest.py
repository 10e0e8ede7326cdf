"""The device digest: known answers, the same alone and in a bucket, and what it must tell apart."""

import numpy as np
import pytest
import torch

from miles_core.weight_sync.digest import ROW_WORDS, bucket_digests, digests_in_rows, named_digests
from miles_core.weight_sync.layout import ROW_BYTES, forms_of, in_rows, without_gaps
from miles_core.weight_sync.packing import copy_all

M = 2**64


def splitmix64(i: int) -> int:
    z = (i + 1) * 0x9E3779B97F4A7C15 % M
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % M
    z = (z ^ z >> 27) * 0x94D049BB133111EB % M
    return z ^ z >> 31


def weight_digest(tensor: torch.Tensor) -> int:
    """Of one tensor alone."""
    _, digests = digests_in_rows(forms_of([("alone", tensor)]), [tensor])
    return int(digests[0]) % M


def by_hand(raw: bytes) -> int:
    """The formula in Python's own integers."""
    words = np.frombuffer(raw + bytes(-len(raw) % 4), dtype=np.int32)
    return (
        sum(
            int(x) * (splitmix64(i % ROW_WORDS) | 1) * (splitmix64(2**32 + i // ROW_WORDS) | 1)
            for i, x in enumerate(words)
        )
        % M
    )


def test_splitmix64_is_the_published_one() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # first output for seed 0


@pytest.mark.parametrize("size", [1, 3, 4, 511, 512, 513, 4096 + 7])
def test_the_digest_follows_its_formula(size: int) -> None:
    raw = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert weight_digest(torch.from_numpy(raw)) == by_hand(raw.tobytes())


def test_known_answer() -> None:
    # one word 1, so the product of the first weights of row and column; -1 gives its negative
    weight = (0xE220A8397B1DCDAF | 1) * (splitmix64(2**32) | 1) % M
    assert weight_digest(torch.tensor([1], dtype=torch.int32)) == weight
    assert weight_digest(torch.tensor([-1], dtype=torch.int32)) == M - weight
    assert weight_digest(torch.zeros(1000)) == 0


TENSORS = [
    ("a", torch.randn(300, 7)),
    ("b", torch.randn(5).bfloat16()),
    ("c", torch.randn(40, 40).to(torch.float8_e4m3fn)),
    ("d", torch.tensor(2.5)),
    ("e", torch.randn(64, 32).T),
    ("f", torch.arange(3)),
    ("g", torch.randn(128)),  # exactly one row
]


def test_in_a_bucket_as_alone() -> None:
    layout = in_rows(forms_of(TENSORS))
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    copy_all(layout.views(flat), [tensor for _, tensor in TENSORS])
    digests = bucket_digests(flat, layout.specs)
    assert [value % M for value in digests.tolist()] == [weight_digest(tensor) for _, tensor in TENSORS]
    named = named_digests(digests, layout.specs)
    assert named["b"] == f"bfloat16 (5,) {weight_digest(TENSORS[1][1]):016x}"


def test_a_bucket_without_whole_rows_is_refused() -> None:
    layout = without_gaps(forms_of(TENSORS))
    with pytest.raises(ValueError, match="do not fill"):
        bucket_digests(torch.zeros(ROW_BYTES * 40, dtype=torch.uint8), layout.specs)


def changed(tensor: torch.Tensor, change: str) -> torch.Tensor:
    words = tensor.clone().view(torch.int32).view(-1)
    if change == "last bit":
        words[777] ^= 1
    elif change == "sign":
        words[777] ^= -(2**31)
    elif change == "two words exchanged":
        words[[3, 900]] = words[[900, 3]]
    elif change == "two rows exchanged":
        rows = words.view(-1, ROW_WORDS)
        rows[[0, 5]] = rows[[5, 0]]
    elif change == "shifted":
        words.copy_(words.roll(1))
    elif change == "stale tail":
        words[-1] = 0
    return words


@pytest.mark.parametrize(
    "change", ["last bit", "sign", "two words exchanged", "two rows exchanged", "shifted", "stale tail"]
)
def test_changes_show(change: str) -> None:
    tensor = torch.randn(2048)
    assert weight_digest(changed(tensor, change)) != weight_digest(tensor)


def test_signs_exchanged_between_equal_words_show() -> None:
    """Words that differ in their highest bit alone: 64-bit words would let this pass."""
    tensor = torch.ones(1024)
    tensor[5] = -1
    other = torch.ones(1024)
    other[6] = -1
    assert weight_digest(tensor) != weight_digest(other)
