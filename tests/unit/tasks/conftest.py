"""A small model on disk, made once."""

from pathlib import Path

import pytest

from conversion.random_model import make_random_model
from miles_core.config.model import RandomModelConfig


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_random_model(folder, **RandomModelConfig(max_position=64).model_dump())
    return folder
