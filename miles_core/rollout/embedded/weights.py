"""The weights of an engine by Hugging Face name: loading, replacing, proving."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from conversion.families import left_out_names, rules_for
from conversion.geometry import ModelGeometry
from conversion.mapping import check_complete
from conversion.safetensors_io import CheckpointError, SafetensorsFolder
from miles_core.weight_sync.bucket import WeightBucket, WeightSyncError, tensor_digest


class EngineWeights:
    """Every tensor of a checkpoint folder, each written straight to where the decoder reads it.

    The decoder's matrices are fused (query, key and value; gate and up; all experts) and a checkpoint's tensors are
    views of them, so nothing derived can go stale. What the decoder doesn't run (MTP layers, further copies of
    embedding and head) is held as it came.
    """

    def __init__(self, geometry: ModelGeometry, views: Mapping[str, torch.Tensor], folder: SafetensorsFolder) -> None:
        """Loads `folder` into `views`.

        Raises:
            ConversionError: the folder lacks tensors, or has some that are unknown to the model's family.
            CheckpointError: tensors have other shapes than config.json implies.
        """
        rules = rules_for(geometry, geometry.mtp_num_layers)
        check_complete(rules_for(geometry, 0), folder.names, left_out_names(geometry, 0))
        shapes = {name: shape for rule in rules for name, shape in rule.hf_shapes().items()}
        self._specs = {name: (folder.spec(name).dtype, folder.spec(name).shape) for name in folder.names}
        if faults := [n for n, (_, shape) in self._specs.items() if shape != shapes[n]]:
            listed = ", ".join(f"{name} has {self._specs[name][1]}, not {shapes[name]}" for name in faults)
            raise CheckpointError(f"{folder.folder}: shapes are not those that config.json implies: {listed}")
        self._views = dict(views)
        self.digests: dict[str, str] = {}
        for name in folder.names:
            self._take(name, folder.read(name))

    def replace(self, buckets: Sequence[WeightBucket]) -> None:
        """Replaces every tensor, or none.

        Raises:
            WeightSyncError: a tensor is missing, unknown, given twice or of another shape or dtype; names them all.
        """
        sent = [spec for bucket in buckets for spec in bucket.specs]
        given = Counter(spec.name for spec in sent)
        faults = {
            "missing": sorted(self._specs.keys() - given.keys()),
            "unknown to the engine": sorted(given.keys() - self._specs.keys()),
            "given more than once": sorted(name for name, count in given.items() if count > 1),
            "of another dtype or shape": [
                f"{spec.name} ({spec.dtype} {list(spec.shape)}, held {self._specs[spec.name][0]} "
                f"{list(self._specs[spec.name][1])})"
                for spec in sent
                if spec.name in self._specs and (spec.dtype, tuple(spec.shape)) != self._specs[spec.name]
            ],
        }
        if any(faults.values()):
            listed = "; ".join(f"{len(names)} {what}: {', '.join(names)}" for what, names in faults.items() if names)
            raise WeightSyncError(f"the push is refused and the engine keeps its weights; tensors are {listed}")
        for bucket in buckets:
            for name, tensor in bucket.tensors():
                self._take(name, tensor)

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._views:
            self._views[name].copy_(tensor)
        else:
            self._views[name] = tensor.clone()
        self.digests[name] = tensor_digest(tensor)
