"""The training loop, one rollout after the other.

    prompts ──► engines ──► samples ──► rewards ──► advantages ──► trainer step(s)
                  ▲                                                     │
                  └────── weights, version = rollouts trained so far ◄──┘        checkpoint when due, marker last

Every algorithm is this loop. PPO's critic and a teacher have their say between rewards and advantages; supervised
fine-tuning has a collector that serves given answers, and no engines; nor does training on saved rollouts.

Everything that decides the next rollout is in the trainer's checkpoint and in the collector's state, so a run that is
killed anywhere and started again gives the same weights, bit for bit, as one that was never interrupted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from miles_core.checkpoint import CheckpointFolder
from miles_core.config.run import RunConfig
from miles_core.observability.metrics import Metrics, Sink, Timers
from miles_core.rollout.collect import Collector
from miles_core.rollout.saved import RolloutFolder, weights_digest
from miles_core.rollout.teachers import Teacher
from miles_core.train_batch import build_train_batches
from miles_core.trainer.trainer import Trainer
from miles_core.types import TrainSample

BUCKET_BYTES = 512 * 2**20


class WeightSource(Trainer, Protocol):
    """A trainer that can hand its weights over as buckets."""

    def weight_buckets(self, quantized: frozenset[str], bucket_bytes: int) -> tuple[list[Any], dict[str, str]]: ...


class WeightSink(Protocol):
    """The rollout engines, as the push sees them."""

    def update_weights(self, buckets: Sequence[Any], digests: Mapping[str, str], version: int) -> None: ...


@dataclass
class Controller:
    """Owns the order of things; every part is handed to it."""

    config: RunConfig
    collector: Collector
    trainer: WeightSource
    engines: WeightSink | None  # None: nothing is sampled
    quantized: frozenset[str]  # names of the tensors that engines hold in the rollout's number format
    checkpoints: CheckpointFolder
    sinks: Sequence[Sink]
    teacher: Teacher | None = None
    saved: RolloutFolder | None = None  # gets every rollout
    _weights: str = field(default="", init=False)  # digest of what the engines serve

    def run(self) -> Path:
        """Trains up to `rollout.num_rollout` and returns the last checkpoint's folder."""
        done = self._resume()
        total = self.config.rollout.num_rollout
        if done < total:
            self._push(done)
        while done < total:
            metrics = self._one_rollout(done)
            done += 1
            for sink in self.sinks:
                sink.write(done - 1, metrics)
            if done % self.config.trainer.checkpoint.interval == 0 or done == total:
                self.checkpoints.save(done, self.trainer.save, self.collector.state_dict())
        return self.checkpoints.folder(done)

    def _resume(self) -> int:
        found = self.checkpoints.latest()
        if found is None:
            return 0
        done, state = found
        self.trainer.load(self.checkpoints.folder(done))
        self.collector.load_state_dict(state)
        return done

    def _one_rollout(self, rollout_id: int) -> Metrics:
        timers = Timers()
        with timers.time("perf/step_time"):
            with timers.time("perf/rollout_time"):
                groups, metrics = self.collector.collect()
            if self.saved is not None:
                self.saved.save(rollout_id, groups, self._weights)
            with timers.time("perf/actor_train_time"):
                steps, batch_metrics = build_train_batches(groups, self.config, self.trainer, self.teacher)
                step_metrics = [self._train(step, rollout_id) for step in steps]
                interval = self.config.algorithm.ref_update_interval
                if interval and (rollout_id + 1) % interval == 0:
                    self.trainer.refresh_reference()
            with timers.time("perf/update_weights_time"):
                self._push(rollout_id + 1)
        tokens = sum(s.response_length for g in groups for s in g.samples)
        return {
            **metrics,
            **batch_metrics,
            **_over_steps(step_metrics),
            **timers.seconds,
            "rollout/weight_version": float(rollout_id),
            "perf/rollout_tokens_per_sec": tokens / timers.seconds["perf/rollout_time"],
        }

    def _train(self, step: Sequence[TrainSample], rollout_id: int) -> Metrics:
        algorithm = self.config.algorithm
        metrics = self.trainer.train_critic(step) if algorithm.needs_critic else {}
        if rollout_id >= algorithm.critic_warmup_rollouts:
            metrics |= self.trainer.train_step(step)
        return metrics

    def _push(self, version: int) -> None:
        if self.engines is None:
            return
        buckets, digests = self.trainer.weight_buckets(self.quantized, BUCKET_BYTES)
        self.engines.update_weights(buckets, digests, version)
        self._weights = weights_digest(digests)


def _over_steps(steps: Sequence[Metrics]) -> Metrics:
    # Skipped steps add up over a rollout's optimizer steps, everything else is averaged.
    names = sorted({name for step in steps for name in step})
    sums = {name: sum(step[name] for step in steps) for name in names}
    return {name: total if name.endswith("skipped_steps") else total / len(steps) for name, total in sums.items()}
