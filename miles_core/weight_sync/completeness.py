"""A push brings every tensor once, as the engine knows it, or nothing is applied."""

from collections import Counter
from collections.abc import Mapping, Sequence

from miles_core.weight_sync.bucket import WeightBucket, WeightSyncError

Form = tuple[str, tuple[int, ...]]  # dtype, shape


def check_complete(buckets: Sequence[WeightBucket], held: Mapping[str, Form]) -> None:
    """Checks a push against the tensors that an engine holds, before any of them is touched.

    Raises:
        WeightSyncError: a tensor is missing, unknown, given twice or of another shape or dtype; names them all.
    """
    sent = [spec for bucket in buckets for spec in bucket.specs]
    given = Counter(spec.name for spec in sent)
    faults = {
        "missing": sorted(held.keys() - given.keys()),
        "unknown to the engine": sorted(given.keys() - held.keys()),
        "given more than once": sorted(name for name, count in given.items() if count > 1),
        "of another dtype or shape": [
            f"{spec.name} ({spec.dtype} {spec.shape}, must be {' '.join(map(str, held[spec.name]))})"
            for spec in sent
            if spec.name in held and (spec.dtype, tuple(spec.shape)) != held[spec.name]
        ],
    }
    if any(faults.values()):
        listed = "; ".join(f"{len(names)} {what}: {', '.join(names)}" for what, names in faults.items() if names)
        raise WeightSyncError(f"push refused, the engine keeps the weights it has; tensors {listed}")
