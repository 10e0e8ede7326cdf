"""A push brings every tensor once, as the engine knows it, or nothing is applied."""

from collections import Counter
from collections.abc import Mapping, Sequence

from miles_core.weight_sync.bucket import WeightBucket, WeightSyncError

Form = tuple[tuple[int, ...], str]  # shape, dtype


def check_complete(buckets: Sequence[WeightBucket], held: Mapping[str, Form]) -> None:
    """Raises WeightSyncError naming tensors that are missing, unknown, sent twice, or of another shape or dtype."""
    sent = [spec for bucket in buckets for spec in bucket.specs]
    counts = Counter(spec.name for spec in sent)
    faults = {
        "missing": sorted(held.keys() - counts.keys()),
        "unknown": sorted(counts.keys() - held.keys()),
        "sent twice": sorted(name for name, count in counts.items() if count > 1),
        "of another shape or dtype": sorted(
            f"{spec.name} (sent {spec.dtype} {list(spec.shape)}, held {held[spec.name][1]} {list(held[spec.name][0])})"
            for spec in sent
            if spec.name in held and (spec.shape, spec.dtype) != held[spec.name]
        ),
    }
    listed = "; ".join(f"{len(names)} {what}: {', '.join(names[:5])}" for what, names in faults.items() if names)
    if listed:
        raise WeightSyncError(f"push of {len(sent)} tensors to an engine that holds {len(held)}: {listed}")
