"""Reading config.json so that nothing in it goes unnoticed."""

from collections.abc import Mapping
from typing import Any

# Keys that don't shape the forward pass in evaluation mode; so are all that begin with an underscore. Every other key
# must be read by the family.
_BOOKKEEPING = {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "auto_map"}
_CONVERTERS = {"is_llama_config", "transformers.js_config", "name_or_path", "problem_type", "id2label", "label2id"}
_STORAGE = {"quantization_config"}  # scales show up as tensors, for which the conversion accounts
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "use_cache", "cache_implementation"}
_TRAINING = {"initializer_range", "pretraining_tp", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size"}
_OUTPUTS = {"output_router_logits", "output_attentions", "output_hidden_states", "return_dict"}
_EXECUTION = {"chunk_size_feed_forward"}  # feed forward in slices; the same result
_WITHOUT_EFFECT = _BOOKKEEPING | _CONVERTERS | _STORAGE | _TOKENS | _TRAINING | _OUTPUTS | _EXECUTION


class UnsupportedModelError(ValueError):
    """config.json asks for something that the family's geometry cannot represent; all such values are listed."""


class ConfigReader:
    """A config.json that remembers which keys were read, and collects every fault before it raises."""

    def __init__(self, config: Mapping[str, Any], architecture: str) -> None:
        self.architecture = architecture
        self._config = config
        self._read: set[str] = set()
        self._faults: list[str] = []

    def get(self, key: str, default: Any, *aliases: str) -> Any:
        """The value of `key` or of one of its older names; `default` where none is there or it is null."""
        self._read.update((key, *aliases))
        values = (self._config.get(name) for name in (key, *aliases))
        return next((value for value in values if value is not None), default)

    def nullable(self, key: str, default: Any) -> Any:
        """The value of `key`, where null means "off" and only an absent key takes the default."""
        self._read.add(key)
        return self._config.get(key, default)

    def mapping(self, key: str) -> dict[str, Any]:
        """A dictionary, empty where the key is absent or null."""
        value = self.get(key, {})
        if isinstance(value, dict):
            return value
        self.refuse(f"{key} is {value!r}, it must be an object")
        return {}

    def size(self, key: str, *aliases: str, default: int | None = None) -> int:
        """A positive whole number, required where it has no default. Returns 1 after recording a fault."""
        value = self.get(key, default, *aliases)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        found = "is missing" if value is None else f"is {value!r}"
        self.refuse(f"{key} {found}, it must be a positive whole number")
        return 1

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse `key` if it is there, not null, and none of `allowed`."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            self.refuse(f"{key} is {value!r}, supported: {', '.join(map(repr, allowed))}")

    def refuse(self, fault: str) -> None:
        """Record a fault; `finish` raises it together with the others."""
        self._faults.append(fault)

    def finish(self) -> None:
        """Raise what was found.

        Raises:
            UnsupportedModelError: lists every recorded fault, and every key with a value that nothing has read.
        """
        unread = self._config.keys() - self._read - _WITHOUT_EFFECT
        unknown = [
            f"{key} = {self._config[key]!r} is not known to this family"
            for key in sorted(unread)
            if self._config[key] is not None and not key.startswith("_")
        ]
        if self._faults or unknown:
            raise UnsupportedModelError(
                f"config.json of this {self.architecture} cannot be represented: "
                + "; ".join(self._faults + unknown)
                + ". Point model.path to a supported model, or extend the family (docs/adding-a-model-family.md)"
            )
