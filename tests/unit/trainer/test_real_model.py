"""A pretrained model through conversion and trainer. `MILES_REAL_MODEL` names its folder, of SmolLM2 for example."""

import filecmp
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion.families import geometry_from_config
from conversion.hf_to_torch_dist import hf_to_torch_dist
from conversion.inspect import diff_checkpoints
from conversion.safetensors_header import read_json
from conversion.torch_dist_to_hf import torch_dist_to_hf
from miles_core.config.run import RunConfig
from miles_core.trainer.megatron.trainer import MegatronTrainer
from miles_core.types import TrainSample

pytestmark = pytest.mark.slow

MAX_NEW_TOKENS = 32
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics state that",
    "12 + 30 =",
    "List of the planets: Mercury, Venus,",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969,",
    "Photosynthesis is the process by which",
    "To make a good cup of tea, first",
    "import numpy as np\n\nx =",
    "The quick brown fox",
    "Q: What is the largest ocean?\nA:",
    "She opened the door and",
    "A triangle with sides 3, 4 and 5 is",
    "Die Hauptstadt von Deutschland ist",
    "<html>\n<head>\n",
    "The main difference between a virus and a bacterium is",
    "1, 2, 4, 8, 16,",
]


@pytest.fixture(scope="module")
def hf() -> Path:
    folder = os.environ.get("MILES_REAL_MODEL")
    if not folder:
        pytest.skip("set MILES_REAL_MODEL to the folder of a pretrained model")
    return Path(folder)


@pytest.fixture(scope="module")
def torch_dist(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "torch_dist"
    hf_to_torch_dist(hf, folder)
    return folder


def test_goes_round_bit_equal(hf: Path, torch_dist: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    torch_dist_to_hf(torch_dist, torch_dist / "hf", back)
    compared = diff_checkpoints(hf, back)
    assert compared.rows and not compared.different
    side_files = {f.name for f in hf.iterdir() if f.suffix in (".json", ".jinja", ".txt", ".model")}
    side_files.discard("model.safetensors.index.json")
    assert side_files
    _, different, unreadable = filecmp.cmpfiles(hf, back, side_files, shallow=False)
    assert not different and not unreadable


@pytest.fixture(scope="module")
def trainer(hf: Path, torch_dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronTrainer]:
    config = RunConfig.model_validate(
        {
            "model": {"path": str(hf)},
            "data": {"task": {}},
            "rollout": {"batch_size": len(PROMPTS), "n_samples_per_prompt": 1},
            "trainer": {"precision": "fp32", "micro_batch_size": 1},
        }
    )
    trainer = MegatronTrainer(
        config,
        geometry_from_config(read_json(hf / "config.json")),
        rank=0,
        world_size=1,
        init_method=f"file://{tmp_path_factory.mktemp('ranks')}/rendezvous",
        checkpoint=torch_dist,
    )
    yield trainer
    trainer.close()


def test_greedy_continuations_equal_those_of_transformers(hf: Path, trainer: MegatronTrainer) -> None:
    """Each generated token is Megatron's likeliest after those before it: by induction the continuations are equal."""
    tokenizer = AutoTokenizer.from_pretrained(hf)
    theirs = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        limits = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS}
        tokens = theirs.generate(ids, attention_mask=torch.ones_like(ids), **limits)[0].numpy()
        expected = tokens[ids.shape[1] :].tolist()
        assert _likeliest(trainer, tokens.astype(np.int32), len(expected)).tolist() == expected, prompt


def _likeliest(trainer: MegatronTrainer, tokens: np.ndarray, response_length: int) -> torch.Tensor:
    """Megatron's likeliest token at each place of the response, int64 [R]."""
    nothing = np.zeros(response_length, dtype=np.float32)
    sample = TrainSample(
        index=0,
        tokens=tokens,
        response_length=response_length,
        loss_mask=np.ones(response_length, dtype=np.uint8),
        loss_weights=nothing,
        advantages=nothing,
        rollout_log_probs=nothing,
    )
    (micro_batch,) = trainer._batches.cut([sample])
    with torch.no_grad():
        hidden = trainer._model.output_inputs(trainer._model.run(micro_batch))
        logits = hidden[micro_batch.logit_positions] @ trainer._model.output_weight().T
    return logits.argmax(-1)
