"""The report's words, axes and definitions, without Spark."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from parapply.amounts import duration, number, percent, size
from parapply.analysis.figures import EACH_TRANSACTION, FIGURES, STAGES
from parapply.analysis.plots import log_axis
from parapply.analysis.session import PACKAGE_FILE, SCRIPT_FILE, write_bundle
from parapply.cli.main import main

_ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0 ms"), (0.00042, "0.42 ms"), (0.0123, "12.3 ms"), (0.9999, "1 s"), (59.0, "59 s"), (150.0, "2.5 minutes"),
     (7200.0, "2.0 hours"), (-0.5, "-500 ms"), (None, "unknown")],
)  # fmt: skip
def test_durations_are_said_as_people_do(seconds: float | None, words: str) -> None:
    """Three digits and the unit that fits."""
    assert duration(seconds) == words


def test_counts_sizes_and_shares() -> None:
    """Counts are whole until they are millions, small shares keep two digits."""
    assert [number(value) for value in (0, 7, 12345, 0.25, 12_345_678)] == ["0", "7", "12,345", "0.25", "12.3 million"]
    assert [size(value) for value in (999, 12_300, 5e13)] == ["999 bytes", "12.3 kB", "50.0 TB"]
    assert [percent(value).replace("\N{NO-BREAK SPACE}", "") for value in (0, 0.5, 0.0123)] == ["0%", "50%", "1.2%"]


def test_a_logarithmic_axis_has_marks_for_any_values() -> None:
    """Equal values, none at all, or nine decades: at least one labelled mark lies within the axis."""
    for values in ([], [0.014, 0.014], [None, 0.0, -1.0], [1e-6, 1e3]):
        axis = log_axis(values)
        low, high = (10**edge for edge in axis["range"])
        assert any(low <= tick <= high for tick in axis["tickvals"])
        assert len(axis["tickvals"]) == len(axis["ticktext"])


def test_the_manual_names_every_figure_and_has_the_stages_as_defined() -> None:
    """docs/REPORT.md names each table once, and repeats the stages word for word, so that neither can drift."""
    manual = (_ROOT / "docs" / "REPORT.md").read_text()
    section = manual.partition("| about | tables |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", section)) == sorted(figure.name for figure in FIGURES)
    for stage, (expression, meaning) in {**STAGES, EACH_TRANSACTION[0]: EACH_TRANSACTION[1:]}.items():
        assert f"| {stage} | `{expression}` | {meaning} |" in manual


def test_the_job_for_a_cluster_starts_from_its_zip_file(tmp_path: Path) -> None:
    """The script finds the package in the zip file alone, and names its arguments when they are missing."""
    write_bundle(tmp_path)
    names = zipfile.ZipFile(tmp_path / PACKAGE_FILE).namelist()
    assert {"parapply/analysis/page.html", "parapply/applylog_schema.py"} <= set(names)
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    done = subprocess.run(
        [sys.executable, "-P", tmp_path / SCRIPT_FILE],
        env={"PYTHONPATH": str(tmp_path / PACKAGE_FILE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Missing argument 'LOGDIR'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "Missing argument 'LOGDIR'"), (["log", "--since", "noon"], "is no time like"),
     (["log", "--memory", "2"], "2g"), (["log", "--spark", "a"], "KEY=VALUE")],
)  # fmt: skip
def test_wrong_options_are_refused_before_java_starts(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong option is a usage error, exit code 2, that says what is wanted."""
    assert main(["report", *arguments]) == 2
    assert words in capsys.readouterr().err
