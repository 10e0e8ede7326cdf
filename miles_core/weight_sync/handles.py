"""A tensor of this process for another one of the same machine: the handle crosses, the bytes stay where they are."""

import base64
import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

_DEVICE = 6  # place of the device's number in what `reduce_tensor` makes of a CUDA tensor


def carrier(flat: Tensor) -> nn.Module:
    """`flat` as its attribute. SGLang moves tensors that it is given to its own device, and what it wrote into the copy
    would be lost; a module's `to` leaves plain attributes where they are."""
    module = nn.Identity()
    module.flat = flat
    return module


def shared_handle(header: str, flat: Tensor) -> str:
    """`[(header, carrier(flat))]` as SGLang's /update_weights_from_tensor takes it: a base64 pickle with a handle.

    One handle is for one reader, who takes it once: torch counts readers by it. The bytes must be in place before it
    is sent, and stay until the reader answers.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump([(header, carrier(_alias(flat)))])
    return base64.b64encode(buffer.getvalue()).decode()


def _alias(flat: Tensor) -> Tensor:
    """The same memory under a storage of its own. torch chains a record to a storage each time that it is shared; on an
    alias these go with it, on a buffer that is shared at every push they would pile up. The alias is of the whole
    buffer, since readers that have mapped it keep the size that they saw first."""
    if not flat.is_cuda:
        return flat
    whole = flat.new_empty(0).set_(flat.untyped_storage())
    return torch.from_dlpack(whole).narrow(0, flat.storage_offset(), len(flat))


class _Pickler(ForkingPickler):
    """Names a GPU by its UUID: the reader may number the GPUs in another way. SGLang's reader expects it."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
