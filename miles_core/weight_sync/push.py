"""One weight push, from the trainer's names to equal digests on both sides."""

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from conversion.quantization.codec import Codec
from miles_core.weight_sync.bucket import WeightSyncError


def encode_weights(
    named_weights: Iterable[tuple[str, torch.Tensor]], codec: Codec | None, quantized: frozenset[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as the engine holds them: those in `quantized` pass through the codec, the rest are as trained."""
    missing = set(quantized)
    for name, tensor in named_weights:
        if codec is not None and name in quantized:
            missing.discard(name)
            yield from codec.encode(name, tensor)
        else:
            yield name, tensor
    if missing:
        raise WeightSyncError(
            f"the trainer never sent {len(missing)} quantized tensors, among them {sorted(missing)[0]}"
        )


def check_digests(
    sent: Mapping[str, str], held: Mapping[str, str], engine: str, *, may_lack: Collection[str] = ()
) -> None:
    """Raises WeightSyncError unless the engine holds exactly what was sent, tensor by tensor; `may_lack` need not be
    held, but must be equal where they are."""
    faults = {
        "sent but not held": sorted(sent.keys() - held.keys() - set(may_lack)),
        "held but not sent": sorted(held.keys() - sent.keys()),
        "different": sorted(n for n in sent.keys() & held.keys() if sent[n] != held[n]),
    }
    if any(faults.values()):
        listed = "; ".join(f"{len(names)} {what}: {', '.join(names[:5])}" for what, names in faults.items() if names)
        raise WeightSyncError(f"weights of {engine} differ from the trainer's after a push: {listed}")
