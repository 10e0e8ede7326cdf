"""One rollout's groups: prompts from the source, responses from the engines, rewards; with DAPO's dynamic sampling."""

from collections.abc import Callable
from typing import Any, Protocol

from miles_core.algorithms.dapo import has_reward_spread
from miles_core.config.run import RunConfig
from miles_core.data.source import PromptSource
from miles_core.observability.metrics import Metrics
from miles_core.rollout.engine import SamplingParams
from miles_core.rollout.generate import Decode, Generate, generate_groups, rollout_metrics
from miles_core.types import Prompt, Sample, SampleGroup

Score = Callable[[list[list[Sample]]], tuple[list[SampleGroup], Metrics]]


class Collector(Protocol):
    """Hands out what is trained on, one rollout after the other."""

    def collect(self) -> tuple[list[SampleGroup], Metrics]:
        """The next `rollout.batch_size` groups, and metrics of them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that decides the next rollout besides the weights; JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state."""
        ...


class RolloutCollector:
    """Samples responses and has them scored."""

    def __init__(
        self,
        config: RunConfig,
        source: PromptSource[Prompt],
        sampling: SamplingParams,
        *,
        generate: Generate,
        decode: Decode,
        score: Score,
    ) -> None:
        self._config, self._source, self._sampling = config, source, sampling
        self._generate, self._decode, self._score = generate, decode, score
        self._next_group_index = 0

    def collect(self) -> tuple[list[SampleGroup], Metrics]:
        """`rollout.batch_size` scored groups and the rollout's metrics.

        Raises RuntimeError when dynamic sampling cannot fill a batch in `rollout.max_sampling_rounds`.
        """
        r = self._config.rollout
        if not r.dynamic_sampling:
            groups, reward_metrics = self._sample(r.batch_size)
            return groups, rollout_metrics(groups) | reward_metrics
        return self._collect_with_spread()

    def _sample(self, prompts: int) -> tuple[list[SampleGroup], Metrics]:
        groups = generate_groups(
            self._source.next(prompts),
            first_group_index=self._next_group_index,
            n_samples_per_prompt=self._config.rollout.n_samples_per_prompt,
            sampling=self._sampling,
            seed=self._config.seed,
            generate=self._generate,
            decode=self._decode,
        )
        self._next_group_index += prompts
        return self._score(groups)

    def _collect_with_spread(self) -> tuple[list[SampleGroup], Metrics]:
        r = self._config.rollout
        sampled: list[SampleGroup] = []
        kept: list[SampleGroup] = []
        reward_metrics: Metrics = {}
        for _ in range(r.max_sampling_rounds):
            groups, metrics = self._sample(r.over_sampling_batch_size or r.batch_size)
            sampled += groups
            kept += [g for g in groups if has_reward_spread([s.reward for s in g.samples if s.reward is not None])]
            reward_metrics = {name: reward_metrics.get(name, 0.0) + value for name, value in metrics.items()}
            if len(kept) >= r.batch_size:
                # raw_reward is that of all sampled groups: that of the kept ones alone would look better than it is.
                return kept[: r.batch_size], {
                    **rollout_metrics(sampled),
                    **reward_metrics,
                    "rollout/dynamic_filter/dropped_groups": float(len(sampled) - len(kept)),
                    "rollout/dynamic_filter/unused_groups": float(len(kept) - r.batch_size),
                }
        raise RuntimeError(
            f"dynamic sampling found {len(kept)} groups with unequal rewards among {len(sampled)} sampled in "
            f"{r.max_sampling_rounds} rounds, rollout.batch_size needs {r.batch_size}: the task is too easy or too "
            "hard for the model; raise rollout.max_sampling_rounds or rollout.n_samples_per_prompt"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._source.state_dict(), "next_group_index": self._next_group_index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state["source"])
        self._next_group_index = state["next_group_index"]
