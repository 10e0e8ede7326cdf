"""RunConfig: everything a run depends on, as one value.

It is the parameter of the Prefect flow, the argument of each stage, and what the cache keys are made of. It imports
no torch, so a configuration can be written, checked and shown on any machine.
"""

from typing import Literal

from pydantic import Field, model_validator

from miles_core.config.algorithm import AlgorithmConfig
from miles_core.config.base import Section
from miles_core.config.data import DataConfig, RewardConfig
from miles_core.config.debug import DebugConfig
from miles_core.config.distillation import DistillationConfig
from miles_core.config.faults import FaultsError
from miles_core.config.model import ModelConfig, QuantizeConfig
from miles_core.config.rollout import RolloutConfig
from miles_core.config.trainer import TrainerConfig
from miles_core.config.weight_sync import WeightSyncConfig


class StoreConfig(Section):
    """Where artifacts live. Credentials come from the environment (AWS_ACCESS_KEY_ID and so on)."""

    uri: str = ".miles/store"
    """A local folder, or any fsspec URI such as s3://bucket/prefix."""
    endpoint_url: str | None = None
    """Endpoint of an S3-compatible server."""


class EvaluateConfig(Section):
    """Scoring of the initial and of the exported model on held-out prompts, through the rollout engine."""

    n_samples_per_prompt: int = Field(1, ge=1)
    """Responses to each prompt."""
    temperature: float = Field(0.0, ge=0, le=10)
    """0 decodes greedily."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest response; null takes rollout.sampling.max_new_tokens."""
    pass_threshold: float = Field(1.0, gt=0, le=1)
    """Reward from which a response counts as correct."""

    @model_validator(mode="after")
    def _samples_differ(self) -> "EvaluateConfig":
        if self.temperature == 0 and self.n_samples_per_prompt > 1:
            raise ValueError(
                f"evaluate.n_samples_per_prompt {self.n_samples_per_prompt} needs evaluate.temperature above 0: "
                "greedy samples are all equal"
            )
        return self


class UploadConfig(Section):
    """Publishing of the exported model."""

    uri: str | None = None
    """Target folder (local path or fsspec URI); null publishes nothing."""
    endpoint_url: str | None = None
    """Endpoint of an S3-compatible server; null takes store.endpoint_url."""


class ClusterConfig(Section):
    """Where the training loop runs."""

    address: str | None = None
    """null: a Ray of its own on this machine. `http://HOST:8265`: submit the loop there as a job that outlives the
    flow; a later flow run finds it again."""
    num_cpus: int | None = Field(None, ge=1)
    """CPUs of the local Ray; null takes the machine's."""
    threads_per_process: int = Field(1, ge=1)
    """Torch threads of each trainer rank and engine on a CPU. Small models are fastest with 1; together they should not
    exceed the cores."""
    object_store_bytes: int = Field(512 * 2**20, ge=80 * 2**20)
    """Shared memory of the local Ray, which carries batches and weights; at least twice the model's bytes."""


class RunConfig(Section):
    """A whole run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name shown in Prefect and in logs; no part of any cache key."""
    seed: int = Field(0, ge=0)
    """Every random choice derives from it."""
    model: ModelConfig
    """The model to train."""
    quantize: QuantizeConfig = QuantizeConfig()
    """Rollout number format."""
    data: DataConfig
    """Prompts."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Learning rule."""
    distillation: DistillationConfig = DistillationConfig()
    """Teachers."""
    trainer: TrainerConfig = TrainerConfig()
    """Optimization."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Weights from the trainer to the engines."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Evaluation."""
    upload: UploadConfig = UploadConfig()
    """Publishing."""
    store: StoreConfig = StoreConfig()
    """Artifacts."""
    cluster: ClusterConfig = ClusterConfig()
    """Ray."""
    debug: DebugConfig = DebugConfig()
    """Rollouts as files."""

    @property
    def samples_per_rollout(self) -> int:
        """Responses of one rollout."""
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.trainer.global_batch_size or self.samples_per_rollout

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of one rollout."""
        return self.samples_per_rollout // self.global_batch_size

    def warnings(self) -> list[str]:
        """What is possible but seldom meant: off-policy training that nothing corrects."""
        algorithm = self.algorithm
        if algorithm.is_supervised or algorithm.off_policy.method != "none":
            return []
        found = []
        if self.steps_per_rollout > 1 and algorithm.opsm_delta is None:
            found.append(
                f"trainer.global_batch_size {self.global_batch_size} makes {self.steps_per_rollout} optimizer steps of "
                "a rollout: the later ones train on responses of an older policy, held in check by the loss's own clip "
                "alone; algorithm.off_policy.method and algorithm.opsm_delta bound it further"
            )
        if self.quantize.format != "none" and not self.trainer.qat:
            found.append(
                f"quantize.format={self.quantize.format}: the rollout's model is not quite the trained one, and "
                "nothing corrects the difference; set algorithm.off_policy.method, for instance to tis"
            )
        return found

    @model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        faults = [
            *_batch_faults(self),
            *_data_faults(self),
            *_algorithm_faults(self),
            *_weight_sync_faults(self),
            *_precision_faults(self),
        ]
        if self.algorithm.is_supervised:
            faults += _supervised_faults(self)
        if self.trainer.exact:
            faults += _exact_faults(self)
        if faults:
            raise FaultsError(faults)
        return self


def _batch_faults(config: RunConfig) -> list[str]:
    faults = []
    r, t = config.rollout, config.trainer
    samples = config.samples_per_rollout
    per_pass = t.micro_batch_size * t.data_parallel_size
    if samples % config.global_batch_size:
        faults.append(
            f"rollout.batch_size {r.batch_size} x rollout.n_samples_per_prompt {r.n_samples_per_prompt} = {samples} "
            f"samples are no multiple of trainer.global_batch_size {config.global_batch_size}: "
            f"{samples % config.global_batch_size} samples of each rollout ({r.num_rollout} rollouts make "
            f"{samples * r.num_rollout}) would remain; change one of the three"
        )
    elif config.global_batch_size % per_pass:
        faults.append(
            f"trainer.global_batch_size {config.global_batch_size} is no multiple of trainer.micro_batch_size "
            f"{t.micro_batch_size} x {t.data_parallel_size} data-parallel ranks = {per_pass}; change one of them"
        )
    over = r.over_sampling_batch_size
    if over is not None and not r.dynamic_sampling:
        faults.append(f"rollout.over_sampling_batch_size {over} needs rollout.dynamic_sampling=true")
    elif over is not None and over < r.batch_size:
        faults.append(f"rollout.over_sampling_batch_size {over} is below rollout.batch_size {r.batch_size}")
    return faults


def _data_faults(config: RunConfig) -> list[str]:
    faults = []
    data, reward = config.data, config.reward
    if reward.type == "task" and data.task is None:
        faults.append("reward.type=task needs data.task; for prompts of a file choose exact_match, math or function")
    if reward.type in ("exact_match", "math", "boxed_math") and data.label_key is None:
        faults.append(f"reward.type={reward.type} compares with a label: set data.label_key")
    if data.task is None and data.eval_prompts is None:
        source = "prompts" if data.prompts is not None else "conversations"
        faults.append(f"data.{source} needs data.eval_prompts, the held-out set that the evaluation scores")
    if data.conversations is not None and not config.algorithm.is_supervised:
        faults.append("data.conversations holds answers to learn: set algorithm.policy_loss=sft, or give data.prompts")
    return faults


def _algorithm_faults(config: RunConfig) -> list[str]:
    faults = []
    algorithm, r, teachers = config.algorithm, config.rollout, config.distillation.teachers
    if algorithm.advantage_estimator == "rloo" and r.n_samples_per_prompt < 2:
        faults.append(f"rloo needs rollout.n_samples_per_prompt of at least 2, found {r.n_samples_per_prompt}")
    if algorithm.overlong_buffer is not None and algorithm.overlong_buffer > r.sampling.max_new_tokens:
        faults.append(
            f"algorithm.overlong_buffer {algorithm.overlong_buffer} is longer than rollout.sampling.max_new_tokens "
            f"{r.sampling.max_new_tokens}"
        )
    if algorithm.critic_warmup_rollouts >= r.num_rollout:
        faults.append(
            f"algorithm.critic_warmup_rollouts {algorithm.critic_warmup_rollouts} leaves none of rollout.num_rollout "
            f"{r.num_rollout} to the policy"
        )
    if config.trainer.critic_optimizer is not None and not algorithm.needs_critic:
        faults.append(f"trainer.critic_optimizer has no effect on {algorithm.advantage_estimator}: ppo has a critic")
    if algorithm.needs_teacher and not teachers:
        faults.append("algorithm.distill_kl_coef and distill_top_k_coef need distillation.teachers, found none")
    if teachers and not algorithm.needs_teacher:
        faults.append(
            f"distillation.teachers names {len(teachers)} that nothing asks: set algorithm.distill_kl_coef or "
            "algorithm.distill_top_k_coef"
        )
    if algorithm.distill_top_k_coef and len(teachers) > 1:
        faults.append(
            f"algorithm.distill_top_k_coef takes one teacher, found {len(teachers)} in distillation.teachers: their "
            "likeliest tokens differ; algorithm.distill_kl_coef takes several"
        )
    return faults


def _weight_sync_faults(config: RunConfig) -> list[str]:
    faults = []
    transport, sglang = config.weight_sync.transport, config.rollout.sglang
    if config.rollout.engine != "sglang":
        if transport == "ipc":
            faults.append(
                f"weight_sync.transport=ipc needs rollout.engine=sglang, found {config.rollout.engine}: set "
                "weight_sync.transport=auto"
            )
        if sglang.release_in_training:
            faults.append(
                f"rollout.sglang.release_in_training {list(sglang.release_in_training)} needs rollout.engine=sglang, "
                f"found {config.rollout.engine}"
            )
        return faults
    if transport == "broadcast":
        faults += [
            f"weight_sync.transport=broadcast {fault}; set weight_sync.transport=ipc or host"
            for fault in broadcast_faults(config)
        ]
    if "weights" in sglang.release_in_training and sglang.drafts:
        faults.append(
            "rollout.sglang.release_in_training with weights loses the draft model's tables, which no push brings: "
            "release kv_cache alone, or remove speculative_algorithm from rollout.sglang.server_args"
        )
    copies = [name for name in ("pp_size", "dp_size") if int(sglang.server_args.get(name, 1)) > 1]
    if "dp_size" in copies and sglang.server_args.get("enable_dp_attention"):
        copies.remove("dp_size")
    faults += [
        f"rollout.sglang.server_args {name}={sglang.server_args[name]}: weights reach the ranks of tensor parallelism "
        "alone; use tp_size, or more rollout.num_engines"
        for name in copies
    ]
    return faults


def broadcast_faults(config: RunConfig) -> list[str]:
    """Why weights can not be broadcast to SGLang servers, which do less with them than with those of other ways."""
    faults = []
    if config.rollout.sglang.drafts:
        faults.append("would leave the draft model of speculative_algorithm behind")
    if config.quantize.format == "int4":
        faults.append("can not bring quantize.format=int4, whose kernels hold the weights in a layout of their own")
    return faults


def _precision_faults(config: RunConfig) -> list[str]:
    if config.trainer.qat and not config.quantize.format.startswith("int4"):
        return [
            f"trainer.qat=true trains for an INT4 rollout, found quantize.format={config.quantize.format}: set it to "
            "int4 or int4_linear"
        ]
    return []


def _supervised_faults(config: RunConfig) -> list[str]:
    """Options that presume sampled responses."""
    faults = []
    r, data = config.rollout, config.data
    if r.n_samples_per_prompt != 1:
        faults.append(f"policy_loss=sft needs rollout.n_samples_per_prompt=1, found {r.n_samples_per_prompt}")
    if r.sampling.temperature != 1:
        faults.append(
            f"policy_loss=sft learns at temperature 1, found rollout.sampling.temperature {r.sampling.temperature}"
        )
    if r.dynamic_sampling:
        faults.append("rollout.dynamic_sampling=true has no effect on policy_loss=sft")
    if config.debug.save_rollouts or config.debug.load_rollouts:
        faults.append(
            "debug.save_rollouts and debug.load_rollouts have no effect on policy_loss=sft: nothing is sampled"
        )
    if data.prompts is not None and data.label_key is None:
        faults.append("policy_loss=sft on data.prompts learns the labels as answers: set data.label_key")
    return faults


def _exact_faults(config: RunConfig) -> list[str]:
    """What keeps log-probs of training and rollout from being equal in every bit."""
    faults = []
    trainer = config.trainer
    if config.rollout.engine != "embedded":
        faults.append(
            f"trainer.exact=true with rollout.engine={config.rollout.engine}: its kernels add up in orders of their "
            "own; set rollout.engine=embedded"
        )
    if trainer.fp8:
        faults.append(
            "trainer.exact=true with trainer.fp8=true: the engine does not round its products to e4m3; set one to false"
        )
    if trainer.qat:
        faults.append(
            "trainer.exact=true with trainer.qat=true: the engine computes with rounded weights in another order; set "
            "one to false"
        )
    for name, size in (("tensor", trainer.parallel.tensor), ("expert", trainer.parallel.expert)):
        if size > 1:
            faults.append(
                f"trainer.exact=true with trainer.parallel.{name} {size}: ranks would add up parts of a sum in an "
                "order of their own; set it to 1"
            )
    if trainer.parallel.context > 1:
        faults.append(
            f"trainer.exact=true with trainer.parallel.context {trainer.parallel.context}: exact mode is offered "
            "without context parallelism; set it to 1"
        )
    if config.quantize.format != "none":
        faults.append(
            f"trainer.exact=true with quantize.format={config.quantize.format}: the rollout's weights are not the "
            "trained ones; set it to none"
        )
    if not trainer.routing_replay:
        faults.append(
            "trainer.exact=true with trainer.routing_replay=false: a token on the border of two experts could take "
            "either; set it to true (dense models do not mind)"
        )
    if config.algorithm.is_supervised:
        faults.append("trainer.exact=true has no effect on policy_loss=sft: nothing is sampled")
    return faults


Stage = Literal["download", "convert", "quantize", "train", "export", "evaluate", "upload"]
STAGES: tuple[Stage, ...] = ("download", "convert", "quantize", "train", "export", "evaluate", "upload")
