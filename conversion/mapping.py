"""Rules between Megatron and Hugging Face tensors, and the proof that they cover a checkpoint exactly."""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class ConversionError(ValueError):
    """A checkpoint and the rules of its family disagree; the message names every tensor concerned."""


class Op(Protocol):
    """An exact, invertible change of layout: no arithmetic, so both ways are bit-equal."""

    def to_megatron(self, hf: Sequence["Tensor"]) -> "Tensor":
        """One Megatron tensor from the Hugging Face tensors of a rule, in the rule's order."""
        ...

    def to_hf(self, megatron: "Tensor") -> list["Tensor"]:
        """The inverse of `to_megatron`; contiguous, so that each can be written to a file as it is."""
        ...

    def hf_shapes(self, megatron: Shape) -> list[Shape]:
        """Shapes of the Hugging Face tensors that make a Megatron tensor of this shape."""
        ...


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor and the Hugging Face tensors that it is made of.

    `optional_hf` are further copies of `hf[0]` that some checkpoints hold (MTP layers repeat the embedding and the
    head): where present they must be bit-equal to it, and Megatron keeps one shared tensor.
    """

    megatron: str
    hf: tuple[str, ...]
    op: Op
    shape: Shape  # of the whole, unsharded Megatron tensor
    optional_hf: tuple[str, ...] = ()

    def hf_shapes(self) -> dict[str, Shape]:
        """Shape of every Hugging Face tensor of this rule, the optional ones included."""
        shapes = dict(zip(self.hf, self.op.hf_shapes(self.shape), strict=True))
        return shapes | dict.fromkeys(self.optional_hf, shapes[self.hf[0]])

    def to_megatron(self, read: Callable[[str], "Tensor"], present: Container[str]) -> "Tensor":
        """Build the Megatron tensor.

        Args:
            read: gives a Hugging Face tensor by name; called once for each name.
            present: the names in the checkpoint, which decide what optional copies are compared.

        Raises:
            ConversionError: a tensor has another shape than the model's config implies, or a copy differs.
        """
        tensors = {name: read(name) for name in self.hf}
        copies = {name: read(name) for name in self.optional_hf if name in present}
        shapes = self.hf_shapes()
        for name, tensor in (tensors | copies).items():
            if tuple(tensor.shape) != shapes[name]:
                raise ConversionError(
                    f"tensor {name} has shape {list(tensor.shape)}, but config.json implies {list(shapes[name])}"
                )
        original = tensors[self.hf[0]]
        for name, copy in copies.items():
            if copy.dtype != original.dtype or not copy.equal(original):
                raise ConversionError(
                    f"tensor {name} must be a copy of {self.hf[0]}, because Megatron holds one tensor for both, "
                    f"but they differ; set model.mtp_num_layers = 0 to leave the MTP layers out"
                )
        return self.op.to_megatron(list(tensors.values()))

    def to_hf(self, megatron: "Tensor", present: Container[str] | None = None) -> dict[str, "Tensor"]:
        """Hugging Face tensors by name; of the optional copies those in `present`, or all where it is None.

        Raises:
            ConversionError: the Megatron tensor has another shape than `shape`.
        """
        if tuple(megatron.shape) != self.shape:
            raise ConversionError(
                f"tensor {self.megatron} has shape {list(megatron.shape)}, but the model's config implies "
                f"{list(self.shape)}"
            )
        tensors = dict(zip(self.hf, self.op.to_hf(megatron), strict=True))
        copies = [name for name in self.optional_hf if present is None or name in present]
        return tensors | dict.fromkeys(copies, tensors[self.hf[0]])


@dataclass(frozen=True)
class Coverage:
    """The account of a checkpoint's tensors: required + copies + left_out = all of them."""

    required: int  # read or written through `Rule.hf`
    copies: int  # optional copies that are there
    left_out: int  # on request, such as MTP layers with model.mtp_num_layers = 0


def check_complete(rules: Sequence[Rule], hf_names: Iterable[str], left_out: Collection[str] = ()) -> Coverage:
    """Prove that each tensor of a checkpoint is used exactly once and that none is missing.

    Args:
        rules: all rules of the model.
        hf_names: the checkpoint's tensor names, one for each time it is stored.
        left_out: names that may be there and are not converted on purpose.

    Raises:
        ConversionError: lists every unmatched, missing and repeated tensor by name.
    """
    found = Counter(iter(hf_names))  # a mapping given to Counter directly would be read as counts
    required = Counter(name for rule in rules for name in rule.hf)
    optional = Counter(name for rule in rules for name in rule.optional_hf)
    megatron = Counter(rule.megatron for rule in rules)
    known = required.keys() | optional.keys() | set(left_out)
    faults = {
        "in the checkpoint, but no rule uses them": sorted(found.keys() - known),
        "missing from the checkpoint": sorted(required.keys() - found.keys()),
        "stored more than once": _repeated(found),
        "used by more than one rule": _repeated(required + optional),
        "made by more than one rule": _repeated(megatron),
    }
    if any(faults.values()):
        raise ConversionError(
            "; ".join(f"{len(names)} tensors {fault}: {', '.join(names)}" for fault, names in faults.items() if names)
        )
    return Coverage(
        required=len(required),
        copies=len(optional.keys() & found.keys()),
        left_out=len(found.keys() - required.keys() - optional.keys()),
    )


def _repeated(names: Counter[str]) -> list[str]:
    return sorted(name for name, count in names.items() if count > 1)
