"""Weights from the trainer to the engines, the way that `weight_sync.transport` says."""

from collections.abc import Sequence

from miles_core.cluster.rollout_group import RolloutGroup
from miles_core.cluster.train_group import TrainGroup
from miles_core.config.run import RunConfig
from miles_core.observability.metrics import Metrics
from miles_core.rollout.saved import weights_digest
from miles_core.weight_sync.bucket import WeightSyncError
from miles_core.weight_sync.transport import transport_of


class WeightPush:
    """The loop's `WeightSync`."""

    def __init__(
        self, config: RunConfig, trainer: TrainGroup, engines: RolloutGroup, quantized: frozenset[str]
    ) -> None:
        """`quantized`: names of the tensors that engines hold in the rollout's number format.

        Raises:
            WeightSyncError: the transport needs one machine, and there are several.
        """
        self._trainer, self._engines, self._quantized = trainer, engines, quantized
        self._transport, self._interval = transport_of(config), config.weight_sync.verify_interval
        self._released = config.rollout.sglang.release_in_training
        self._pushes = self._version = 0
        if self._transport != "host":
            engines.push_again = self._push_again
        if self._transport == "ipc" and (elsewhere := {h.node for h in engines.handles} - {trainer.node()}):
            raise WeightSyncError(
                f"weight_sync.transport=ipc needs trainer and engines on one machine, found engines on "
                f"{len(elsewhere)} others: set weight_sync.transport=broadcast"
            )

    def release_devices(self) -> None:
        """The devices are the trainer's until the next push."""
        if self._released:
            self._engines.release_memory(self._released)

    def push(self, version: int) -> Metrics:
        """Every engine then samples with these weights; raises WeightSyncError where one can not."""
        peak = self._trainer.free_memory(for_engines=bool(self._released))
        metrics: Metrics = {"perf/trainer_peak_memory_gb": peak} if peak else {}
        if self._transport == "host":
            buckets, digests = self._trainer.weight_buckets(self._quantized)
            self._engines.update_weights(buckets, digests, version)
            return metrics
        verify = self._interval > 0 and self._pushes % self._interval == 0
        self._pushes, self._version = self._pushes + 1, version
        return metrics | self._push_to(range(len(self._engines.handles)), verify)

    def digest(self) -> str:
        """Of the weights as engines hold them, while the trainer's are still those of the last push."""
        return weights_digest(self._trainer.weight_digests(self._quantized))

    def _push_again(self, engines: Sequence[int]) -> None:
        """To engines that were started anew in the midst of a rollout."""
        self._trainer.leave_group()
        self._push_to(engines, verify=self._interval > 0)

    def _push_to(self, engines: Sequence[int], verify: bool) -> Metrics:
        handles = [self._engines.handles[i] for i in engines]
        report = self._trainer.push_weights(self._quantized, handles, self._version, verify=verify)
        metrics = report.metrics()
        while report.lost:  # each counts against rollout.sglang.max_restarts
            handles = [handles[i] for i in sorted(report.lost)]
            report = self._trainer.push_weights(self._quantized, handles, self._version, verify=verify)
        return metrics
