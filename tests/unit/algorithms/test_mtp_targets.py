"""What the multi-token prediction layer learns on packed sequences."""

import pytest
import torch

from miles_core.algorithms.mtp import mtp_targets

A, B, C, D, E, F, G, PAD = range(1, 9)


def targets(tokens: list[int], trainable: list[int], ids: list[int], depth: int = 1) -> list[int | None]:
    found, trained = mtp_targets(
        torch.tensor(tokens), torch.tensor(trainable, dtype=torch.bool), torch.tensor(ids), depth=depth
    )
    assert (found[~trained] == 0).all()
    return [t if m else None for t, m in zip(found.tolist(), trained.tolist(), strict=True)]


PACKED = [A, B, C, D, E, F, G]
IDS = [0, 0, 0, 1, 1, 1, 1]


def test_targets_stay_in_their_sequence() -> None:
    assert targets(PACKED, [1] * 7, IDS) == [C, None, None, F, G, None, None]
    alone = targets(PACKED[:3], [1] * 3, [0] * 3) + targets(PACKED[3:], [1] * 4, [0] * 4)
    assert alone == targets(PACKED, [1] * 7, IDS)


def test_masked_token_is_no_target() -> None:
    assert targets(PACKED, [1, 1, 1, 1, 1, 0, 1], IDS) == [C, None, None, None, G, None, None]


@pytest.mark.parametrize("pad", [PAD, A, 0])
def test_padding_and_its_id_change_nothing(pad: int) -> None:
    assert targets([*PACKED, pad], [1] * 7 + [0], [*IDS, 2]) == [*targets(PACKED, [1] * 7, IDS), None]


@pytest.mark.parametrize(("depth", "expected"), [(2, [None] * 3 + [G] + [None] * 3), (6, [None] * 7), (9, [None] * 7)])
def test_deeper_layers_look_further(depth: int, expected: list[int | None]) -> None:
    assert targets(PACKED, [1] * 7, IDS, depth) == expected
