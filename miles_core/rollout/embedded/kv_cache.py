"""Keys and values of the sequences being decoded, one row each, all rows in one allocation."""

import torch


class KVCache:
    """A row holds one sequence: column t has the keys and values of its token t, whatever else is in the batch.

    Heads are laid out before columns, so that `read` gives batched matrix products their operands without a copy.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_columns: int,
        num_heads: int,
        key_width: int,
        value_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`value_width` 0: the values are the first dims of the keys (MLA)."""
        self.num_rows, self.num_columns, self.num_heads = num_rows, num_columns, num_heads
        self._key_width, self._value_width = key_width, value_width
        # Zeros, not whatever memory held: columns behind a row's end are read, and masking turns no NaN into 0.
        shape = (num_layers, num_rows, num_heads, num_columns, key_width + value_width)
        self._store = torch.zeros(shape, dtype=dtype, device=device)
        # Views made once, because making one costs as much as a small operation.
        self._by_head = list(self._store.flatten(1, 2))
        self._by_token = list(self._store.flatten(1, 3))

    def fill(self, layer: int, rows: slice, source: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Row `rows.start + i` gets prompt `source[i]` of keys and values [prompts, heads, columns, d]."""
        self._store[layer, rows, :, : keys.shape[2]] = self._join(keys, values)[source]

    def append(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes one token a row, keys and values [rows, heads, d], to `slots` as `slots_of` gives them."""
        self._by_token[layer].index_copy_(0, slots, self._join(keys, values).flatten(0, 1))

    def slots_of(self, columns: torch.Tensor) -> torch.Tensor:
        """Flat indices of column `columns[row]` of each row and head, int64 [rows * heads]."""
        heads = torch.arange(len(columns) * self.num_heads, device=columns.device)
        return heads * self.num_columns + columns.repeat_interleave(self.num_heads)

    def read(self, layer: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first rows and columns, views [rows * heads, columns, d]."""
        part = self._by_head[layer][: rows * self.num_heads, :columns]
        return (part[..., : self._key_width], part[..., self._key_width :]) if self._value_width else (part, part)

    def move(self, sources: torch.Tensor, targets: torch.Tensor, columns: int) -> None:
        """Overwrites rows `targets` with rows `sources`, their first `columns` columns, in every layer."""
        self._store[:, targets, :, :columns] = self._store[:, sources, :, :columns]

    def _join(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.cat((keys, values), dim=-1) if self._value_width else keys
