import json
from pathlib import Path

from miles_core.observability.metrics import JsonLines, TensorBoard, read_json_lines


def test_lines_read_back_in_order_and_a_new_sink_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for count in (4, 2):
        sink = JsonLines(path)
        for rollout_id in range(count):
            sink.write(rollout_id, {"x": float(rollout_id)})
        sink.close()
    assert read_json_lines(path) == [{"rollout_id": 0, "x": 0.0}, {"rollout_id": 1, "x": 1.0}]


def test_what_is_not_finite_stays_valid_json(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.write(0, {"x": float("nan"), "y": 1.0})
    sink.close()
    text = (tmp_path / "m.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: 1 / 0) == {"rollout_id": 0, "x": None, "y": 1.0}


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path / "tb")
    for step in range(3):
        sink.write(step, {"rollout/raw_reward": step / 10})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("rollout/raw_reward")
    assert [(e.step, round(e.value, 3)) for e in events] == [(0, 0.0), (1, 0.1), (2, 0.2)]
