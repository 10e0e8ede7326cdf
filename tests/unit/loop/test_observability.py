import json
from pathlib import Path

from miles_core.observability.metrics import JsonLines, TensorBoard, read_json_lines


def test_each_rollout_stands_once_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path, 0)
    for rollout_id in range(4):
        first.write(rollout_id, {"x": float(rollout_id)})
    first.close()
    with path.open("a") as file:
        file.write('{"rollout_id": 4, "x"')  # cut off by a kill
    second = JsonLines(path, 2)
    second.write(2, {"x": 20.0})
    second.close()
    assert read_json_lines(path) == [
        {"rollout_id": 0, "x": 0.0},
        {"rollout_id": 1, "x": 1.0},
        {"rollout_id": 2, "x": 20.0},
    ]


def test_what_is_not_finite_stays_valid_json(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "m.jsonl", 0)
    sink.write(0, {"x": float("nan"), "y": 1.0})
    sink.close()
    text = (tmp_path / "m.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: 1 / 0) == {"rollout_id": 0, "x": None, "y": 1.0}


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, 0)
    for step in range(3):
        sink.write(step, {"rollout/raw_reward": step / 10})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("rollout/raw_reward")
    assert [(e.step, round(e.value, 3)) for e in events] == [(0, 0.0), (1, 0.1), (2, 0.2)]
