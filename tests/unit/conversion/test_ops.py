"""Layouts by hand on small numbers; round trips over real models are in test_families."""

import pytest
import torch

from conversion.ops import GateUp, Identity, MergeQkv


def test_merge_qkv_interleaves_by_key_value_head():
    # 4 query heads, 2 key-value heads, head_dim 1: each row is its own head, so the order can be read off.
    query, key, value = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    merged = MergeQkv(num_heads=4, num_kv_heads=2, head_dim=1).to_megatron([query, key, value])
    assert merged.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "columns"),
    [(4, 2, 3, (5,)), (4, 4, 2, (5,)), (6, 1, 4, (5,)), (4, 2, 3, ())],
    ids=["grouped", "multi-head", "multi-query", "bias"],
)
def test_merge_qkv_round_trip(heads, kv_heads, head_dim, columns):
    op = MergeQkv(heads, kv_heads, head_dim)
    rows = [count * head_dim for count in (heads, kv_heads, kv_heads)]
    parts = [torch.randn(row, *columns) for row in rows]
    merged = op.to_megatron(parts)
    assert merged.shape == (sum(rows), *columns)
    assert op.hf_shapes(tuple(merged.shape)) == [tuple(part.shape) for part in parts]
    for back, part in zip(op.to_hf(merged), parts, strict=True):
        assert back.equal(part)
        assert back.is_contiguous()


def test_gate_comes_first():
    gate, up = torch.zeros(3, 2), torch.ones(3, 2)
    merged = GateUp().to_megatron([gate, up])
    assert merged.tolist() == [[0, 0]] * 3 + [[1, 1]] * 3
    assert [part.tolist() for part in GateUp().to_hf(merged)] == [gate.tolist(), up.tolist()]
    assert GateUp().hf_shapes((6, 2)) == [(3, 2), (3, 2)]


def test_identity_takes_one_tensor():
    tensor = torch.randn(2, 3)
    assert Identity().to_megatron([tensor]) is tensor
    assert Identity().to_hf(tensor.T)[0].is_contiguous()
    with pytest.raises(ValueError, match="too many values"):
        Identity().to_megatron([tensor, tensor])
