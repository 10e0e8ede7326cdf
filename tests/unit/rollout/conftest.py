"""SGLang's client against a server that speaks its format."""

from pathlib import Path

import pytest

from conversion.random_model import make_random_model
from miles_core.config.model import RandomModelConfig
from miles_core.config.rollout import SglangConfig
from miles_core.rollout.sglang.engine import SglangEngine

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_random_model(folder, **RandomModelConfig(hidden_size=32).model_dump())
    return folder


@pytest.fixture(scope="module")
def start(model):
    """Starts an engine with its server."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", f"{HERE}:{ROOT}")
    engines = []

    def start(**settings) -> SglangEngine:
        settings = {"requests_per_call": 2, "startup_timeout": 30, **settings}
        engines.append(SglangEngine(model, SglangConfig(**settings), bucket_bytes=20_000, module="sglang_wire_server"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
    patch.undo()
