"""From the configuration to what is trained on: prompts to answer, or answers that are given."""

from pathlib import Path

from miles_core.config.run import RunConfig
from miles_core.data.conversations import ConversationSet, load_conversations
from miles_core.data.dataset import PromptSet, load_prompts
from miles_core.data.source import PromptSource
from miles_core.data.tokenization import Tokenizer
from miles_core.rewards import build_scorer
from miles_core.rollout.collect import Collector, RolloutCollector
from miles_core.rollout.collect_conversations import ConversationCollector
from miles_core.rollout.generate import Generate, sampling_params
from miles_core.rollout.saved import Origin, SavedCollector, folder_weights_digest

TrainingData = PromptSet | ConversationSet


def load_training_data(config: RunConfig, tokenizer: Tokenizer, max_length: int) -> TrainingData:
    """`max_length` is that of the model, in tokens. Raises `DataError` with all faults."""
    if config.algorithm.is_supervised:
        return load_conversations(config, tokenizer, max_length)
    return load_prompts(config, tokenizer, split="train")


def samples_anew(config: RunConfig) -> bool:
    """Whether a run needs engines: neither given answers nor saved rollouts."""
    return not config.algorithm.is_supervised and config.debug.load_rollouts is None


def build_collector(
    config: RunConfig, data: TrainingData, tokenizer: Tokenizer, model_folder: Path, generate: Generate | None
) -> Collector:
    """The collector of a run; `generate` asks the engines, and is None where nothing is sampled. `model_folder` is the
    Hugging Face folder that the run starts from, in the rollout's number format."""
    if config.debug.load_rollouts is not None:
        origin = Origin.of(model_folder, config.rollout.sampling.temperature)
        return SavedCollector(config, Path(config.debug.load_rollouts), origin, folder_weights_digest(model_folder))
    if isinstance(data, ConversationSet):
        source = PromptSource(data.conversations, seed=config.seed, shuffle=config.data.shuffle)
        return ConversationCollector(config, source)
    assert generate is not None, "prompts need engines"
    return RolloutCollector(
        config,
        PromptSource(data.prompts, seed=config.seed, shuffle=config.data.shuffle),
        sampling_params(config, tokenizer.stop_token_ids),
        generate=generate,
        decode=tokenizer.decode,
        score=build_scorer(config, data.prompts),
    )
