"""The training loop, one rollout after the other.

    prompts ──► engines ──► samples ──► rewards ──► advantages ──► trainer step(s)
                  ▲                                                     │
                  └────── weights, version = rollouts trained so far ◄──┘        checkpoint when due, marker last

Every algorithm is this loop. PPO's critic and a teacher have their say between rewards and advantages; supervised
fine-tuning has a collector that serves given answers, and no engines; nor does training on saved rollouts.

Everything that decides the next rollout is in the trainer's checkpoint and in the collector's state, so a run that is
killed anywhere and started again gives the same weights, bit for bit, as one that was never interrupted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from miles_core.checkpoint import CheckpointFolder
from miles_core.config.run import RunConfig
from miles_core.observability.metrics import Metrics, Sink, Timers
from miles_core.rollout.collect import Collector
from miles_core.rollout.saved import RolloutFolder
from miles_core.rollout.teachers import Teacher
from miles_core.train_batch import build_train_batches
from miles_core.trainer.trainer import Trainer
from miles_core.types import TrainSample


class WeightSync(Protocol):
    """Trainer and engines take turns: engines have the trainer's weights, and the devices until they release them."""

    def push(self, version: int) -> Metrics:
        """Every engine then samples with the trainer's present weights."""
        ...

    def release_devices(self) -> None:
        """No engine is at work until the next push."""
        ...

    def digest(self) -> str:
        """`weights_digest` of what the last push brought; asked for before the trainer goes on."""
        ...


@dataclass
class Controller:
    """Owns the order of things; every part is handed to it."""

    config: RunConfig
    collector: Collector
    trainer: Trainer
    weights: WeightSync | None  # None: nothing is sampled
    checkpoints: CheckpointFolder
    sinks: Sequence[Sink]
    teacher: Teacher | None = None
    saved: RolloutFolder | None = None  # gets every rollout

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
            if self.weights is not None:
                self.weights.release_devices()
            if self.saved is not None:
                assert self.weights is not None, "what is saved has been sampled"
                self.saved.save(rollout_id, groups, self.weights.digest())
            with timers.time("perf/actor_train_time"):
                steps, batch_metrics = build_train_batches(groups, self.config, self.trainer, self.teacher)
                step_metrics = [self._train(step, rollout_id) for step in steps]
                interval = self.config.algorithm.ref_update_interval
                if interval and (rollout_id + 1) % interval == 0:
                    self.trainer.refresh_reference()
            with timers.time("perf/update_weights_time"):
                push_metrics = self._push(rollout_id + 1)
        tokens = sum(s.response_length for g in groups for s in g.samples)
        return {
            **metrics,
            **batch_metrics,
            **_over_steps(step_metrics),
            **push_metrics,
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

    def _push(self, version: int) -> Metrics:
        return self.weights.push(version) if self.weights is not None else {}


def _over_steps(steps: Sequence[Metrics]) -> Metrics:
    # Skipped steps add up over a rollout's optimizer steps, everything else is averaged.
    names = sorted({name for step in steps for name in step})
    sums = {name: sum(step[name] for step in steps) for name in names}
    return {name: total if name.endswith("skipped_steps") else total / len(steps) for name, total in sums.items()}
