"""A push brings every tensor once, as the engine knows it."""

from collections.abc import Iterable, Mapping, Sequence

from miles_core.weight_sync.bucket import WeightBucket, WeightSyncError
from miles_core.weight_sync.layout import TensorSpec

HeldForm = tuple[str, tuple[int, ...]]  # dtype, shape


class PushAccount:
    """What one push has brought so far, against the tensors that an engine holds."""

    def __init__(self, held: Mapping[str, HeldForm]) -> None:
        self._held = held
        self._given: set[str] = set()

    def take(self, specs: Iterable[TensorSpec]) -> None:
        """To be called before any of these tensors is touched.

        Raises:
            WeightSyncError: one is unknown, given twice or of another shape or dtype; names them all.
        """
        _refuse(self._faults(specs))

    def finish(self) -> None:
        """To be called before anything is generated.

        Raises:
            WeightSyncError: tensors are missing; names them all.
        """
        _refuse(self._missing())

    def _faults(self, specs: Iterable[TensorSpec]) -> dict[str, list[str]]:
        unknown, twice, different = [], [], []
        for spec in specs:
            form = (spec.dtype, tuple(spec.shape))
            if spec.name in self._given:
                twice.append(spec.name)
            elif spec.name not in self._held:
                unknown.append(spec.name)
            elif form != self._held[spec.name]:
                must_be = " ".join(map(str, self._held[spec.name]))
                different.append(f"{spec.name} ({spec.dtype} {spec.shape}, must be {must_be})")
            self._given.add(spec.name)
        return {"unknown to the engine": unknown, "given more than once": twice, "of another dtype or shape": different}

    def _missing(self) -> dict[str, list[str]]:
        return {"missing": sorted(self._held.keys() - self._given)}


def check_complete(buckets: Sequence[WeightBucket], held: Mapping[str, HeldForm]) -> None:
    """Checks a whole push against the tensors that an engine holds, before any of them is touched.

    Raises:
        WeightSyncError: a tensor is missing, unknown, given twice or of another shape or dtype; names them all.
    """
    account = PushAccount(held)
    faults = account._faults(spec for bucket in buckets for spec in bucket.specs)
    _refuse(account._missing() | faults)


def _refuse(faults: Mapping[str, Sequence[str]]) -> None:
    if any(faults.values()):
        listed = "; ".join(f"{len(names)} {what}: {', '.join(names)}" for what, names in faults.items() if names)
        raise WeightSyncError(f"push refused; tensors {listed}")
