"""Keys and values of the sequences being decoded, one row each, all rows in one allocation a layer."""

import torch


class KVCache:
    """A row holds one sequence: column t has the key and value of its token t, whatever else is in the batch.

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
        value_width: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`value_width` None: the values are the first dims of the keys (MLA), and aren't stored."""

        # Zeros, not whatever memory held: columns behind a row's end are read, and masking turns no NaN into 0.
        def allocate(width: int) -> torch.Tensor:
            return torch.zeros(num_layers, num_rows, num_heads, num_columns, width, dtype=dtype, device=device)

        self.num_rows, self.num_columns, self.num_heads = num_rows, num_columns, num_heads
        self._stores = [allocate(width) for width in (key_width, value_width) if width is not None]
        # views of each layer, made once: making one costs as much as a small operation
        self._by_row = [[store[layer].flatten(0, 1) for store in self._stores] for layer in range(num_layers)]
        self._by_token = [[rows.flatten(0, 1) for rows in layer] for layer in self._by_row]

    def fill(self, layer: int, rows: slice, source: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Row `rows.start + i` gets prompt `source[i]` of keys and values [prompts, heads, columns, d]."""
        for store, new in zip(self._stores, (keys, values), strict=False):
            store[layer, rows, :, : new.shape[2]] = new[source]

    def append(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes one token a row, keys [rows, heads, d], to `slots` as `slots_of` gives them."""
        for store, new in zip(self._by_token[layer], (keys, values), strict=False):
            store.index_copy_(0, slots, new.flatten(0, 1))

    def slots_of(self, columns: torch.Tensor) -> torch.Tensor:
        """Flat indices of column `columns[row]` of each row and head, int64 [rows * heads]."""
        heads = torch.arange(len(columns) * self.num_heads, device=columns.device)
        return heads * self.num_columns + columns.repeat_interleave(self.num_heads)

    def read(self, layer: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [rows * heads, columns, d] of the first rows and columns; MLA takes its values from the keys."""
        views = [store[: rows * self.num_heads, :columns] for store in self._by_row[layer]]
        return views[0], views[-1]

    def move(self, sources: torch.Tensor, targets: torch.Tensor, columns: int) -> None:
        """Overwrites rows `targets` with rows `sources`, their first `columns` columns, in every layer."""
        for store in self._stores:
            store[:, targets, :, :columns] = store[:, sources, :, :columns]
