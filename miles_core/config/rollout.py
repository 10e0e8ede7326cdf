"""How responses are sampled."""

from typing import Literal

from pydantic import Field

from miles_core.config.base import Section


class SamplingConfig(Section):
    """Sampling of one response. Log-probs everywhere are those of the logits divided by `temperature`."""

    temperature: float = Field(1.0, gt=0, le=10)
    """Divides the logits; greedy decoding is for evaluation only (evaluate.temperature=0)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = Field(-1, ge=-1)
    """Keep this many tokens; -1 keeps all."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest response in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response besides the tokenizer's end-of-sequence tokens."""


class SglangConfig(Section):
    """The SGLang server of each engine (rollout.engine=sglang)."""

    server_args: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Arguments of `sglang.launch_server`, with underscores and without dashes: {"mem_fraction_static": 0.5}."""
    requests_per_call: int = Field(32, ge=1)
    """Responses asked for in one HTTP call; what is lost, and asked for again, when a server dies."""
    max_calls: int = Field(64, ge=1)
    """HTTP calls in flight at once."""
    startup_timeout: float = Field(600.0, gt=0)
    """Seconds until a server must answer; the first start of a kernel backend compiles."""
    max_restarts: int = Field(3, ge=0)
    """How often a server that died is started again over the run."""
    release_in_training: tuple[Literal["kv_cache", "weights"], ...] = ()
    """Device memory that a server gives to a trainer on the same GPU until the next push. weights come anew with it."""

    @property
    def num_ranks(self) -> int:
        """Processes of one server that hold weights: those of its tensor parallelism."""
        return int(self.server_args.get("tp_size", self.server_args.get("tensor_parallel_size", 1)))

    @property
    def drafts(self) -> bool:
        """Whether servers decode speculatively with a draft model."""
        return "speculative_algorithm" in self.server_args


class RolloutConfig(Section):
    """One rollout is `batch_size` prompts times `n_samples_per_prompt` responses."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """embedded: our own, in process, CPU or GPU. sglang: an SGLang server."""
    num_rollout: int = Field(100, ge=1)
    """Rollouts of the whole run."""
    batch_size: int = Field(16, ge=1)
    """Prompts of one rollout."""
    n_samples_per_prompt: int = Field(8, ge=1)
    """Responses to each prompt: one group."""
    sampling: SamplingConfig = SamplingConfig()
    """How each response is sampled."""
    dynamic_sampling: bool = False
    """DAPO: groups whose rewards are all equal are dropped, and further prompts sampled in their place."""
    over_sampling_batch_size: int | None = Field(None, ge=1)
    """Prompts sampled at once under dynamic sampling; null takes `batch_size`."""
    max_sampling_rounds: int = Field(10, ge=1)
    """Dynamic sampling ends the run with an error when so many rounds did not fill a batch."""
    sglang: SglangConfig = SglangConfig()
    """Settings of SGLang servers."""
    num_engines: int = Field(1, ge=1)
    """Rollout engines; groups are shared out between them."""
    max_batch_tokens: int = Field(65536, ge=256)
    """Most tokens (prompt and response, padding included) an embedded engine decodes at once."""
