"""Every random choice derives from the run's seed and from what it is for, never from the order of work."""

import hashlib


def derive_seed(run_seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. ("sample", rollout_id, sample_index): the same on every machine, and
    unrelated between purposes."""
    text = "/".join(str(part) for part in (run_seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
