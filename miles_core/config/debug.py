"""One half of a run without the other: rollouts kept as files, and training on such files."""

from pydantic import model_validator

from miles_core.config.base import Section


class DebugConfig(Section):
    """Rollouts as files, one each, with all that training takes from them. `miles run --debug` uses them."""

    save_rollouts: str | None = None
    """Local folder that gets every rollout of the run."""
    load_rollouts: str | None = None
    """Local folder of saved rollouts to train on, in place of sampling; no engine is started. Refused where they come
    from another model, tokenizer, temperature or batch size."""

    @model_validator(mode="after")
    def _one_direction(self) -> "DebugConfig":
        if self.save_rollouts is not None and self.load_rollouts is not None:
            raise ValueError(
                f"debug.save_rollouts {self.save_rollouts} and debug.load_rollouts {self.load_rollouts}: rollouts are "
                "either sampled and saved or loaded; set one"
            )
        return self
