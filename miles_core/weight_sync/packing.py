"""A stream of tensors into flat buckets on the device, in buffers that are used again from push to push."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.weight_sync.layout import Form, Layout, forms_of, padded

NamedTensor = tuple[str, Tensor]


@dataclass(frozen=True)
class PackedBucket:
    """A filled buffer; `last` closes the push."""

    number: int
    layout: Layout
    flat: Tensor  # uint8 [layout.nbytes]
    last: bool


@dataclass(frozen=True)
class _Prepared:
    """What is the same in every push for the bucket of one number."""

    forms: list[Form]
    layout: Layout
    flat: Tensor
    targets: list[Tensor]
    paddings: list[Tensor]


class Packer:
    """Packs tensors, in order, into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    Args:
        bucket_bytes: size of a bucket.
        lay_out: where the tensors of a bucket lie.
        buffer: gives the memory of the bucket `number`, uint8, at least that many bytes, once nobody reads
            what was there.
    """

    def __init__(
        self, bucket_bytes: int, lay_out: Callable[[list[Form]], Layout], buffer: Callable[[int, int], Tensor]
    ) -> None:
        self._bucket_bytes, self._lay_out, self._buffer = bucket_bytes, lay_out, buffer
        self._prepared: dict[int, _Prepared] = {}

    def pack(self, named_tensors: Iterable[NamedTensor]) -> Iterator[PackedBucket]:
        """Each bucket as soon as it is full; its memory is valid until `buffer` gives it away again."""
        for number, (tensors, last) in enumerate(full_groups(named_tensors, self._bucket_bytes)):
            yield self._fill(number, tensors, last)

    def _fill(self, number: int, tensors: list[NamedTensor], last: bool) -> PackedBucket:
        forms = forms_of(tensors)
        known = self._prepared.get(number)
        layout = known.layout if known and known.forms == forms else self._lay_out(forms)
        # All buckets of a model that needs several get equal buffers: a larger one later would be a new one to engines.
        nbytes = layout.nbytes if last and number == 0 else max(layout.nbytes, self._bucket_bytes)
        flat = self._buffer(number, nbytes)[: layout.nbytes]
        if known is None or known.layout is not layout or known.flat.data_ptr() != flat.data_ptr():
            known = _Prepared(forms, layout, flat, layout.views(flat), layout.paddings(flat))
            self._prepared[number] = known
        by_name = dict(tensors)
        copy_all(known.targets, [by_name[spec.name] for spec in layout.specs])
        if known.paddings:
            torch._foreach_zero_(known.paddings)
        return PackedBucket(number, layout, known.flat, last)


def full_groups(named_tensors: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[tuple[list[NamedTensor], bool]]:
    """Tensors in order, as many at once as fit into a bucket (a larger one alone), and whether they are the last."""
    pending: list[NamedTensor] = []
    size = 0
    for name, tensor in named_tensors:
        nbytes = padded(tensor.nbytes)
        if pending and size + nbytes > bucket_bytes:
            yield pending, False
            pending, size = [], 0
        pending.append((name, tensor.detach()))
        size += nbytes
    if pending:
        yield pending, True


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies many tensors in few kernels: torch fuses those of equal dtypes that are contiguous, if there are no others
    among them."""
    groups: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        plain = target.is_contiguous() and source.is_contiguous()
        ours, theirs = groups.setdefault((target.dtype, source.dtype, plain), ([], []))
        ours.append(target)
        theirs.append(source)
    with torch.no_grad():
        for ours, theirs in groups.values():
            torch._foreach_copy_(ours, theirs)
