"""NaN and infinity in weights: found at the speed of memory, and never passed on."""

import torch

from conversion.mapping import ConversionError


def nonfinite_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Number of NaN and of infinite values."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0, 0
    values = tensor.float() if tensor.itemsize == 1 else tensor  # few operations know the 8-bit formats
    # NaN wins in aminmax, so two numbers tell; it reads at memory speed, isfinite at a fiftieth of it.
    if all(extreme.isfinite() for extreme in values.aminmax()):
        return 0, 0
    return int(values.isnan().sum()), int(values.isinf().sum())


def check_finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; raises `ConversionError` with name and counts where it holds NaN or infinity."""
    nan, inf = nonfinite_counts(tensor)
    if nan or inf:
        raise ConversionError(f"tensor {name} holds {nan} NaN and {inf} infinite values among {tensor.numel()}")
    return tensor
