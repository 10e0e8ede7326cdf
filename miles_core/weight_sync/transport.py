"""Which way weights take."""

from miles_core.config.run import RunConfig, broadcast_faults
from miles_core.config.weight_sync import Transport


def transport_of(config: RunConfig) -> Transport:
    """`weight_sync.transport`, with auto resolved."""
    if config.weight_sync.transport != "auto":
        return config.weight_sync.transport
    if config.rollout.engine == "embedded":
        return "host"
    if config.cluster.address is None:
        return "ipc"
    return "host" if broadcast_faults(config) else "broadcast"
