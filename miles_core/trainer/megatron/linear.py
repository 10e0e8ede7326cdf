"""megatron-core's linear layers and our experts, multiplying in another number format."""

from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from miles_core.precision.products import Products
from miles_core.trainer.megatron.experts import GroupedExperts


def use_products(model: nn.Module, products: Products) -> None:
    """Lets all linear layers and experts of the decoder's and the MTP layers' blocks multiply through `products`.

    What lies outside a block (embedding, output layer, an MTP layer's input projection) and the router stay plain.
    """
    for path, block in model.named_modules():
        if isinstance(block, TransformerLayer):
            for name, module in block.named_modules(prefix=path):
                if isinstance(module, GroupedExperts):
                    products.check(f"{name}.fc1", module.fc1)
                    products.check(f"{name}.fc2", module.fc2)
                    module.products = products
                elif isinstance(module, ColumnParallelLinear | RowParallelLinear):
                    products.check(f"{name}.weight", module.weight)
                    # What `forward` of both calls between its communication before and after. They have no option, and
                    # latent attention takes no subclass of theirs.
                    module._forward_impl = partial(_multiply, products)


def _multiply(
    products: Products,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    **unused: Any,  # fusions that are switched off
) -> Tensor:
    """Stands for megatron-core's `linear_with_grad_accumulation_and_async_allreduce`."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    output = products.linear(input, weight)
    return output if bias is None else output + bias
