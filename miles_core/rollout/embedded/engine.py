"""The rollout engine that needs neither a server nor a GPU."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch

from conversion.families import FAMILIES, geometry_from_config
from conversion.geometry import ModelGeometry
from conversion.quantization.codec import codec_from_config
from conversion.quantization.dequantized import model_dtype
from conversion.safetensors_io import SafetensorsFolder
from miles_core.rollout.embedded.decoder import Decoder
from miles_core.rollout.embedded.exact import ExactDecoder
from miles_core.rollout.embedded.generation import Generation
from miles_core.rollout.embedded.receiver import EmbeddedReceiver
from miles_core.rollout.embedded.scoring import route, score, top_k
from miles_core.rollout.embedded.weights import EngineWeights
from miles_core.rollout.engine import Completion, GenerateRequest
from miles_core.weight_sync.bucket import WeightBucket


class EmbeddedEngine:
    """A decoder in plain PyTorch with continuous batching, in the caller's process; see RolloutEngine.

    Not thread-safe, except for `abort`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        max_batch_tokens: int = 65536,
        exact: bool = False,
        num_threads: int | None = None,
    ) -> None:
        """Loads a Hugging Face folder.

        Args:
            folder: config.json, safetensors, and generation_config.json if there is one.
            device: any device of PyTorch.
            dtype: of weights and activations, "float32" or "bfloat16"; None takes that of config.json. Routers and
                log-probs are float32 anyway.
            max_batch_tokens: most tokens (prompt and response, padding included) decoded at once.
            exact: results that do not depend on what a request is batched with, and equal the trainer's exact mode bit
                for bit; slower.
            num_threads: threads of PyTorch in this process; None leaves them as they are.

        Raises:
            UnknownFamilyError, UnsupportedModelError: the architecture has no family, or asks for what it lacks.
            CheckpointError, ConversionError: the folder's tensors are not exactly those of the model.
            ValueError, InexactMachineError: `exact` of a model, or on a machine, that does not allow it.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        config = json.loads((folder / "config.json").read_text())
        geometry = geometry_from_config(config)
        torch_dtype = getattr(torch, dtype) if dtype else model_dtype(config)
        names = FAMILIES[geometry.architecture].hf_names
        decoder = (ExactDecoder if exact else Decoder)(geometry, names, torch_dtype, torch.device(device))
        with SafetensorsFolder(folder) as opened:
            codec = codec_from_config(config.get("quantization_config"))
            weights = EngineWeights(geometry, dict(decoder.tensors()), opened, codec)
        self._model: _Model | None = _Model(decoder, weights)
        self._eos_ids = _eos_ids(folder, config, geometry.vocab_size)
        self._max_batch_tokens = max_batch_tokens
        self._version = 0
        self._abort = Event()

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Answers in the order of the requests.

        Raises:
            ValueError: a request does not fit the model or `max_batch_tokens`; no request is started.
            NonFiniteLogitsError: the model gave NaN.
        """
        decoder = self._opened().decoder
        self._abort.clear()
        for request in requests:
            _check(request, decoder.geometry)
        if not requests:
            return []
        generation = Generation(decoder, requests, self._eos_ids, self._max_batch_tokens)
        generation.run(self._abort)
        return generation.completions(self._version)

    def abort(self) -> None:
        """Ends the `generate` call that runs in another thread within one step; its unfinished requests come back
        with what they have and finish_reason "abort". Without a running call it does nothing."""
        self._abort.set()

    @torch.inference_mode()
    def score(self, token_lists: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probs of the given sequences, float32 [T - 1] each: entry t is that of token t + 1 after those before it,
        of the logits divided by `temperature`."""
        return score(self._opened().decoder, token_lists, temperature)

    @torch.inference_mode()
    def top_k(
        self, token_lists: Sequence[np.ndarray], k: int, temperature: float = 1.0
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The k likeliest tokens in place of those that `score` scores: ids int32 and log-probs float32, [T - 1, k]
        each, in falling order, of the logits divided by `temperature`."""
        return top_k(self._opened().decoder, token_lists, k, temperature)

    @torch.inference_mode()
    def route(self, token_lists: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Experts that the given sequences take, int16 [T, layers, top_k] each, -1 in dense layers."""
        return route(self._opened().decoder, token_lists)

    def update_weights(self, buckets: Sequence[WeightBucket], version: int) -> None:
        """Replaces every tensor of the folder, or none; see `EngineWeights.replace`."""
        self._opened().weights.replace(buckets)
        self._version = version

    def push_receiver(self) -> EmbeddedReceiver:
        """The engine's end of a push by broadcast."""
        return EmbeddedReceiver(self)

    def weight_version(self) -> int:
        """Version of the weights now served; 0 is what was loaded from disk."""
        self._opened()
        return self._version

    def weight_digests(self) -> dict[str, str]:
        """`tensor_digest` of each tensor as it was received, by Hugging Face name."""
        return dict(self._opened().weights.digests)

    def close(self) -> None:
        """Frees the weights. Further calls, except `close`, are errors."""
        self._model = None

    def _opened(self) -> "_Model":
        if self._model is None:
            raise RuntimeError("the engine is closed")
        return self._model


@dataclass(frozen=True)
class _Model:
    decoder: Decoder
    weights: EngineWeights


def _check(request: GenerateRequest, g: ModelGeometry) -> None:
    length, new = len(request.prompt_ids), request.sampling.max_new_tokens
    fault = None
    if length < 1 or new < 1:
        fault = f"{length} prompt tokens and max_new_tokens {new}, both must be at least 1"
    elif length + new > g.max_position:
        fault = (
            f"{length} prompt tokens and max_new_tokens {new} exceed max_position_embeddings {g.max_position} of the "
            "model: lower rollout.sampling.max_new_tokens or data.max_prompt_length"
        )
    else:
        ids = np.concatenate((request.prompt_ids, request.sampling.stop_token_ids))
        if ids.min() < 0 or ids.max() >= g.vocab_size:
            fault = f"token ids from {ids.min():.0f} to {ids.max():.0f}, the model has 0 to {g.vocab_size - 1}"
    if fault:
        raise ValueError(f"request {request.request_id}: {fault}")


def _eos_ids(folder: Path, config: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """By generation_config.json, else by config.json; tokens that the model can't emit are left out."""
    generation = folder / "generation_config.json"
    overrides = json.loads(generation.read_text()) if generation.is_file() else {}
    found = overrides.get("eos_token_id", config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [found]
    return frozenset(i for i in ids if i is not None and i < vocab_size)
