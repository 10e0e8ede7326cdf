"""Bars are for terminals and long stages alone."""

import pytest

import tasks.progress as progress
from storage.progress import no_progress


def work(capsys: pytest.CaptureFixture[str]) -> str:
    """What a stage that reports progress writes to stderr."""
    with progress.stage_progress("convert") as report:
        report(1, 2, "half")
        report(2, 2, "all")
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SHOWN_AFTER_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")


@pytest.mark.usefixtures("at_once")
def test_long_stage_has_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show_progress():
        assert "convert" in work(capsys)


def test_short_stage_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show_progress():
        assert work(capsys) == ""


@pytest.mark.usefixtures("at_once")
def test_quiet_and_outside_of_a_terminal_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show_progress(quiet=True):
        assert work(capsys) == ""
    with progress.stage_progress("convert") as report:
        assert report is no_progress
