"""Each token's share in the loss of the global batch."""

import numpy as np
import pytest

from miles_core.algorithms.aggregation import loss_weights

MASKS = [np.array(mask, np.uint8) for mask in ([1, 0, 1, 1], [0, 0], [1])]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sample_mean", [[1 / 9, 0, 1 / 9, 1 / 9], [0, 0], [1 / 3]]),
        ("token_mean", [[1 / 4, 0, 1 / 4, 1 / 4], [0, 0], [1 / 4]]),
        ("constant", [[1 / 30, 0, 1 / 30, 1 / 30], [0, 0], [1 / 30]]),
    ],
)
def test_shares(mode: str, expected: list[list[float]]) -> None:
    found = loss_weights(MASKS, mode, 10)
    assert all(weights.dtype == np.float32 for weights in found)
    assert [weights.tolist() for weights in found] == [pytest.approx(row) for row in expected]


@pytest.mark.parametrize("masks", [[], [[0, 0], [0]]], ids=["no sample", "no trainable token"])
@pytest.mark.parametrize("mode", ["sample_mean", "token_mean", "constant"])
def test_nothing_to_train_on_is_an_error_and_no_loss_of_zero(mode: str, masks: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=f"nothing to train on: {len(masks)} samples"):
        loss_weights([np.array(mask) for mask in masks], mode, 10)
