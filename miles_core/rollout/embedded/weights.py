"""The weights of an engine by Hugging Face name: loading, replacing, proving."""

from collections.abc import Callable, Mapping, Sequence

import torch

from conversion.families import left_out_names, rules_for
from conversion.geometry import ModelGeometry
from conversion.mapping import check_complete
from conversion.quantization.codec import Codec
from conversion.safetensors_io import CheckpointError, SafetensorsFolder
from miles_core.weight_sync.bucket import WeightBucket, tensor_digest
from miles_core.weight_sync.completeness import check_complete as check_complete_push


class EngineWeights:
    """Every tensor of a checkpoint folder, each written straight to where the decoder reads it.

    The decoder's matrices are fused (query, key and value; gate and up; all experts) and a checkpoint's tensors are
    views of them, so nothing derived can go stale. Quantized weights are decoded on their way. What the decoder
    doesn't run (MTP layers, further copies of embedding and head) is held as it came.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        views: Mapping[str, torch.Tensor],
        folder: SafetensorsFolder,
        codec: Codec | None,
    ) -> None:
        """Loads `folder`, whose quantized weights `codec` decodes, into `views`.

        Raises:
            ConversionError: the folder lacks tensors, or has some that are unknown to the model's family.
            CheckpointError: tensors have other shapes than config.json implies.
            QuantizationError: parts of a quantized weight are missing.
        """
        self._views, self._codec = views, codec
        self._specs = {name: (folder.spec(name).dtype, folder.spec(name).shape) for name in folder.names}
        self._quantized = codec.quantized_in(folder.names) if codec else frozenset()
        parts = {part for name in self._quantized for part in self._stored_names(name)}
        self._names = [name for name in folder.names if name not in parts] + sorted(self._quantized)
        check_complete(rules_for(geometry, 0), self._names, left_out_names(geometry, 0))
        self._check_shapes(geometry)
        self._held: dict[str, torch.Tensor] = {}
        self.digests: dict[str, str] = {}
        self._fill(folder.read)

    def replace(self, buckets: Sequence[WeightBucket]) -> None:
        """Replaces every tensor, or none.

        Raises:
            WeightSyncError: a tensor is missing, unknown, given twice or of another shape or dtype; names them all.
        """
        check_complete_push(buckets, self._specs)
        tensors = dict(named for bucket in buckets for named in bucket.tensors())
        self._fill(tensors.__getitem__)

    def _fill(self, read: Callable[[str], torch.Tensor]) -> None:
        for name in self._names:
            stored = {part: read(part) for part in self._stored_names(name)}
            self.digests |= {part: tensor_digest(tensor) for part, tensor in stored.items()}
            if (view := self._views.get(name)) is None:
                self._held |= {part: tensor.clone() for part, tensor in stored.items()}
            elif self._codec is not None and name in self._quantized:
                view.copy_(self._codec.decode(name, stored, view.dtype))
            else:
                view.copy_(stored[name])

    def _stored_names(self, name: str) -> tuple[str, ...]:
        return self._codec.stored_names(name) if self._codec and name in self._quantized else (name,)

    def _check_shapes(self, geometry: ModelGeometry) -> None:
        rules = rules_for(geometry, geometry.mtp_num_layers)
        implied = {name: shape for rule in rules for name, shape in rule.hf_shapes().items()}
        found = {}
        for name in self._names:
            stored = [self._specs[part][1] for part in self._stored_names(name)]
            found[name] = self._codec.weight_shape(stored) if self._codec and name in self._quantized else stored[0]
        if faults := [f"{name} {found[name]}, not {implied[name]}" for name in found if found[name] != implied[name]]:
            raise CheckpointError(f"shapes are not those that config.json implies: {'; '.join(faults)}")
