"""What many sequences produced, step by step, given back sequence by sequence."""

import numpy as np


class TokenLog:
    """Rows of many owners in the order of time.

    A step costs one append whatever its number of rows; the rows are sorted by owner once, at the end.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        self._owners = [np.empty(0, dtype=np.int64)]
        self._rows = [np.empty((0, *row_shape), dtype=dtype)]

    def append(self, owners: np.ndarray, rows: np.ndarray) -> None:
        """Row i belongs to owners[i], int64 [rows]. Keeps references: the caller must not write to them again."""
        self._owners.append(owners)
        self._rows.append(rows)

    def split(self, num_owners: int) -> list[np.ndarray]:
        """The rows of owners 0 ... num_owners - 1, each in the order of time."""
        owners = np.concatenate(self._owners)
        ends = np.bincount(owners, minlength=num_owners).cumsum()
        return np.split(np.concatenate(self._rows)[np.argsort(owners, kind="stable")], ends[:-1])
