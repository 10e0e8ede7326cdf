"""From the configuration to what is trained on: prompts to answer, or answers that are given."""

from miles_core.config.run import RunConfig
from miles_core.data.conversations import ConversationSet, load_conversations
from miles_core.data.dataset import PromptSet, load_prompts
from miles_core.data.source import PromptSource
from miles_core.data.tokenization import Tokenizer
from miles_core.rewards import build_scorer
from miles_core.rollout.collect import Collector, RolloutCollector
from miles_core.rollout.collect_conversations import ConversationCollector
from miles_core.rollout.generate import Generate, sampling_params

TrainingData = PromptSet | ConversationSet


def load_training_data(config: RunConfig, tokenizer: Tokenizer, max_length: int) -> TrainingData:
    """`max_length` is that of the model, in tokens. Raises `DataError` with all faults."""
    if config.algorithm.is_supervised:
        return load_conversations(config, tokenizer, max_length)
    return load_prompts(config, tokenizer, split="train")


def build_collector(
    config: RunConfig, data: TrainingData, tokenizer: Tokenizer, generate: Generate | None
) -> Collector:
    """The collector of a run; `generate` asks the engines, and is None where nothing is sampled."""
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
