"""The reference model: a copy of the policy's weights on the host, lent to the same modules."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ReferenceWeights:
    """Weights that take the policy's place for a while. Buffers (the router's bias) are fixed and shared."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._weights = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}

    def refresh(self) -> None:
        """Takes over the policy's present weights."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                self._weights[name].copy_(parameter)

    @contextmanager
    def in_place_of_policy(self) -> Iterator[None]:
        """Within it the model is the reference."""
        policy: dict[str, Tensor] = {name: p.data for name, p in self._model.named_parameters()}
        for name, parameter in self._model.named_parameters():
            parameter.data = self._weights[name].to(parameter.device)
        try:
            yield
        finally:
            for name, parameter in self._model.named_parameters():
                parameter.data = policy[name]
