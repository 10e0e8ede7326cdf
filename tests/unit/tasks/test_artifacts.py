"""What is shown: the lineage of every step, and curves that hold the numbers they were given."""

import base64
import math
from xml.etree import ElementTree

import pytest
from run_configs import small_config

import tasks.artifacts as artifacts
from storage.manifest import ArtifactRef
from tasks.artifacts import LiveTraining, artifact_key, lineage_markdown
from tasks.curve import as_markdown_image, curve_svg
from tasks.pipeline import PIPELINE
from tasks.stage import StageOutcome

SVG = "{http://www.w3.org/2000/svg}"


def outcome(name: str, cached: bool) -> StageOutcome:
    ref = ArtifactRef(uri=f"/store/{name}", kind="kind", key=name, digest=f"digest-of-{name}")
    return StageOutcome(ref=ref, cached=cached, seconds=1.25)


def rows(markdown: str) -> dict[str, list[str]]:
    """Cells of the table by the first of each row."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()[2:]]
    return {first: rest for first, *rest in cells}


def test_lineage_names_every_step_and_its_parents() -> None:
    done = {step.name: outcome(step.name, cached=step.name != "export") for step in PIPELINE}
    table = rows(lineage_markdown(done, None))
    assert list(table) == [step.name for step in PIPELINE]
    state, seconds, artifact, digest, parents = table["train"]
    assert (state, seconds, digest) == ("cached", "1.2", "`digest-of-train`")
    assert artifact == "[kind/train](file:///store/train)"
    assert parents == "convert `digest-of-co`, quantize `digest-of-qu`"
    assert table["export"][0] == "ran"


def test_lineage_of_a_failed_run_says_what_failed_and_what_did_not_run() -> None:
    done = {name: outcome(name, cached=True) for name in ("download", "convert", "quantize")}
    table = rows(lineage_markdown(done, "ValueError: a | b\nsecond line"))
    assert table["train"][0] == "failed: ValueError: a / b second line"
    assert {
        table[name][0] for name in ("export", "export-quantized", "evaluate-initial", "evaluate-exported", "upload")
    } == {"not run"}


@pytest.mark.parametrize(
    ("run_name", "key"),
    [("tiny", "lineage-tiny"), ("Qwen3-4B_v1.5", "lineage-qwen3-4b-v1-5"), ("a--b.", "lineage-a-b")],
)
def test_artifact_key_is_made_of_what_prefect_takes(run_name: str, key: str) -> None:
    assert artifact_key("lineage", run_name) == key


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(svg)
    return [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]  # type: ignore[misc]
        for line in root.iter(f"{SVG}polyline")
    ]


def test_curve_places_values_linearly() -> None:
    thin, thick = polylines(curve_svg({0: 0.0, 5: 0.5, 10: 1.0}, "reward"))
    assert thin == [(52.0, 230.0), (379.0, 130.0), (706.0, 30.0)]
    assert thick == [(52.0, 230.0), (379.0, 180.0), (706.0, 130.0)]  # running means 0, 0.25, 0.5


@pytest.mark.parametrize("values", [{0: 0.5}, {3: 0.5, 4: 0.5}, {0: math.nan, 1: 1.0}])
def test_curve_of_little(values: dict[int, float]) -> None:
    finite = sum(map(math.isfinite, values.values()))
    assert [len(line) for line in polylines(curve_svg(values, "<reward>"))] == [finite, finite]


def test_long_curve_is_thinned_and_keeps_its_end() -> None:
    thin, _ = polylines(curve_svg({i: float(i) for i in range(10_001)}, "reward"))
    assert len(thin) <= 402
    assert (thin[0], thin[-1]) == ((52.0, 230.0), (706.0, 30.0))


def test_curve_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="finite value, found none among 1 rollouts"):
        curve_svg({0: math.nan}, "reward")


def test_markdown_image_holds_the_drawing() -> None:
    svg = curve_svg({0: 1.0}, "reward")
    image = as_markdown_image(svg, "mean reward")
    assert image.startswith("![mean reward](data:image/svg+xml;base64,")
    assert base64.b64decode(image.split("base64,")[1].rstrip(")")).decode() == svg


def test_training_goes_on_when_the_server_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(artifacts, "create_progress_artifact", unreachable)
    live = LiveTraining(small_config("/store"), seconds_between_updates=0)
    for rollout in range(3):
        live.update({"rollout_id": rollout, "rollout/raw_reward": 0.5})
    assert [record.getMessage() for record in caplog.records] == [
        "live training is no longer shown in Prefect: no server"
    ]
