"""A quantized checkpoint folder, read as if it had never been quantized."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from conversion.quantization.codec import Codec, codec_from_config
from conversion.safetensors_header import TensorSpec, read_json
from conversion.safetensors_io import SafetensorsFolder


class DequantizedFolder:
    """Has the interface of `SafetensorsFolder`: the weights' own names, shapes, and one dtype for all of them."""

    def __init__(self, folder: Path, codec: Codec, dtype: torch.dtype) -> None:
        """Raises as `SafetensorsFolder` does, and QuantizationError where parts of a weight are missing."""
        self._stored = SafetensorsFolder(folder)
        self._codec = codec
        self._dtype = dtype
        self.folder = self._stored.folder
        self.quantized = codec.quantized_in(self._stored.names)
        main = {codec.stored_names(name)[0]: name for name in self.quantized}
        others = {part for name in self.quantized for part in codec.stored_names(name)} - main.keys()
        self._specs = {}
        for stored in self._stored.names:  # in the order of the files
            if stored in main:
                self._specs[main[stored]] = self._dequantized_spec(main[stored])
            elif stored not in others:
                self._specs[stored] = self._stored.spec(stored)

    def __enter__(self) -> "DequantizedFolder":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays open between reads."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights, in the order of files and offsets."""
        return tuple(self._specs)

    @cached_property
    def total_bytes(self) -> int:
        return sum(spec.nbytes for spec in self._specs.values())

    def spec(self, name: str) -> TensorSpec:
        """What `read` gives (file and offset are those of the stored tensor). Raises as `SafetensorsFolder.spec`."""
        return self._specs[name] if name in self._specs else self._stored.spec(name)

    def read(self, name: str) -> torch.Tensor:
        """The tensor; a weight that is stored quantized is decoded."""
        if name not in self.quantized:
            return self._stored.read(name)
        stored = {part: self._stored.read(part) for part in self._codec.stored_names(name)}
        return self._codec.decode(name, stored, self._dtype)

    def _dequantized_spec(self, name: str) -> TensorSpec:
        stored = [self._stored.spec(part) for part in self._codec.stored_names(name)]
        shape = self._codec.weight_shape([spec.shape for spec in stored])
        return TensorSpec(name, shape, str(self._dtype).removeprefix("torch."), stored[0].file, stored[0].offset)


def open_checkpoint(folder: Path) -> SafetensorsFolder | DequantizedFolder:
    """The weights of `folder` in high precision: as they are, or decoded to the dtype that config.json names.

    Raises:
        CheckpointError: the folder is incomplete or damaged.
        QuantizationError: it is quantized in a format that is not supported.
    """
    config = read_json(Path(folder) / "config.json")
    codec = codec_from_config(config.get("quantization_config"))
    return SafetensorsFolder(folder) if codec is None else DequantizedFolder(folder, codec, model_dtype(config))


def model_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a model's unquantized weights by its config.json; bf16 where it names none."""
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
