"""Comparison of predictions with runs: its verdict on a cell, its command's refusals, and logs that were kept."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING

import msgspec
import pytest
from click.testing import CliRunner

from bench.run_what_if import main
from bench.what_if import FROM_WORKERS, KINDS, WORKERS, Cell
from parapply.analysis.changes import ORDERS
from parapply.applylog_schema import IntervalRecord
from tests.analysis.hand_log import at, batch

if TYPE_CHECKING:
    from pathlib import Path

    from parapply.applylog_schema import Record


def _cell(measured_s: float, predicted_s: float) -> Cell:
    return Cell(
        kind="live", order="preserve", workers=8, measured_s=measured_s, rounds_s=(measured_s,), others=0.0,
        predicted_s=predicted_s, least_s=0.9 * predicted_s, most_s=2 * predicted_s, limit="source",
    )  # fmt: skip


def test_a_cell_is_good_within_a_part_of_what_was_measured() -> None:
    """A prediction may be too long or too short by 15 % of the measured time; the interval is judged by itself."""
    assert [_cell(1.0, predicted_s).is_good for predicted_s in (0.84, 0.86, 1.14, 1.16)] == [False, True, True, False]
    assert [_cell(measured_s, 1.0).is_within for measured_s in (0.89, 0.91, 1.99, 2.01)] == [False, True, True, False]
    document = _cell(1.0, 1.5).document()
    assert (document["error"], document["is_good"], document["is_within"]) == (0.5, False, False)


def test_a_part_of_a_load_is_shorter_and_not_slower() -> None:
    """Of a backlog there are fewer transactions, of a live load fewer seconds; never none."""
    assert FROM_WORKERS in WORKERS
    live, backlog = KINDS["live"], KINDS["slow-reads"]
    assert (live.shortened(0.5).live_s, live.shortened(0.5).transactions) == (4, live.transactions)
    assert backlog.shortened(0.1).transactions == backlog.transactions // 10
    assert live.shortened(0.001).live_s == 1


def test_what_is_not_there_is_refused_before_anything_starts() -> None:
    """A target of another name, and rounds that measure nothing."""
    for wrong in (["--target", "slow-network"], ["--rounds", "0"], ["--part", "0"]):
        assert CliRunner().invoke(main, wrong).exit_code == 2


@pytest.mark.slow
def test_logs_that_were_kept_are_compared_again(tmp_path: Path) -> None:
    """`--from` needs no server: measured seconds come from the logs, and so does where they were measured.

    Of two rounds that one counts during which least else ran.
    """
    missing = CliRunner().invoke(main, ["--target", "live", "--from", str(tmp_path), "--no-save"])
    assert missing.exit_code == 1
    assert "whatif-live-preserve-2-0" in missing.output
    for order, workers, number in product(ORDERS, WORKERS, range(2)):
        log = tmp_path / f"whatif-live-{order}-{workers}-{number}"
        log.mkdir()
        each_s = 0.2 - 0.1 * number
        records: list[Record] = [
                batch(
                    seq, received_at=seq * each_s, started_at=seq * each_s, committed_at=seq * each_s + 0.05,
                    execute_s=0.05,
                )
                for seq in range(1, 10 + workers)
            ]  # fmt: skip
        records.append(
                IntervalRecord(
                    slot="app", run="r1", ended_at=at(1.0), length_s=1.0, workers=workers, leader_cpu_s=0.1,
                    publisher_s=0.0, paused_s=0.0, behind_bytes=0, processors=2, busy_cpu_s=1.5 - number,
                    sessions_cpu_s=0.2, sender_cpu_s=0.1,
                )
            )  # fmt: skip
        (log / "apply-app.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, records)))
    (tmp_path / "measured.json").write_text('{"machine": {"cores": 2}}')
    shown = CliRunner().invoke(main, ["--target", "live", "--from", str(tmp_path), "--out", str(tmp_path)])
    assert "cells within 15%" in shown.output
    (file,) = tmp_path.glob("whatif-2*.json")
    document = json.loads(file.read_bytes())
    assert document["machine"] == {"cores": 2}
    measured_s = {cell["workers"]: round(cell["measured_s"], 6) for cell in document["cells"]}
    assert {round(cell["others"], 6) for cell in document["cells"]} == {0.1}
    assert [len(cell["rounds_s"]) for cell in document["cells"]] == [2] * 8
    assert measured_s == {2: 1.05, 4: 1.25, 8: 1.65, 16: 2.45}
