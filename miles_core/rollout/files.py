"""Names of saved rollouts, for those who only want to know whether they are there (see rollout/saved.py)."""

from pathlib import Path


def rollout_file(folder: Path, rollout_id: int) -> Path:
    """Where the rollout of this number lies."""
    return folder / f"rollout_{rollout_id:07d}.npz"
