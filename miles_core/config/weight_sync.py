"""How weights get from the trainer to the rollout engines."""

from typing import Literal

from pydantic import Field

from miles_core.config.base import Section

Transport = Literal["ipc", "broadcast", "host"]


class WeightSyncConfig(Section):
    """The push after each rollout's training."""

    transport: Literal["auto", "ipc", "broadcast", "host"] = "auto"
    """ipc: engines read the trainer's GPU memory; same machine. broadcast: NCCL between GPUs, gloo between CPUs; any
    machine. host: through memory of the host. auto: ipc for SGLang on this machine, broadcast for SGLang on a cluster,
    host for the embedded engine."""
    bucket_bytes: int = Field(512 * 2**20, ge=2**20, le=2**35)
    """Bytes sent at once; the trainer's rank 0 keeps two such buffers. Larger ones are faster."""
    verify_interval: int = Field(10, ge=0)
    """Every so many pushes, the first included, engines prove by digests that they hold what was sent; 0 never.
    Missing, unknown and misshapen tensors are refused always. transport=host proves every push."""
