"""A run whose weights go by broadcast, between Ray's processes, learns what one learns whose weights go by the host."""

from pathlib import Path

import pytest

from miles_core.cluster.session import local_ray
from miles_core.config.load import load_config
from miles_core.config.run import ClusterConfig
from miles_core.observability.metrics import read_json_lines
from miles_core.run import WEIGHTS_FILE
from storage.store import ArtifactStore
from tasks.pipeline import run_single_stage

pytestmark = pytest.mark.slow


def test_broadcast_and_host_give_the_same_run(tmp_path: Path) -> None:
    weights, rows = {}, {}
    with local_ray(ClusterConfig(num_cpus=2)):
        for transport in ("host", "broadcast"):
            options = [
                f"weight_sync.transport={transport}", f"store.uri={tmp_path / 'store'}", "rollout.num_rollout=3",
                "weight_sync.bucket_bytes=1048576", "weight_sync.verify_interval=2", "rollout.num_engines=2",
            ]  # fmt: skip
            config = load_config("tiny", None, options)
            for stage in ("download", "convert", "quantize", "train"):
                ref = run_single_stage(config, stage)[stage].ref
            store = ArtifactStore(config.store.uri)
            folder = Path(config.store.uri) / "train" / ref.key
            weights[transport] = (folder / WEIGHTS_FILE).read_text()
            rows[transport] = read_json_lines(folder / store.manifest(ref).outputs["metrics"])
    assert weights["broadcast"] == weights["host"]
    verified = [row["perf/weights_verified_tensors"] for row in rows["broadcast"]]
    assert verified[0] == verified[2] == 0 and verified[1] > 100  # of the pushes 1, 2 and 3; push 0 is before the first
    assert "perf/weights_gbytes" not in rows["host"][0]
