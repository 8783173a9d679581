"""Predictions from files of a log, and of trials beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.analysis.changes import Change
from parapply.analysis.logged import Trial, predicted_of
from parapply.applylog_schema import RowCounts
from tests.analysis.hand_log import A, batch, write

if TYPE_CHECKING:
    from pathlib import Path


def _log(folder: Path, n_batches: int, changes: int, each_s: float) -> Path:
    """Write a log of batches that one worker applied one after the other."""
    batches = [
        batch(
            seq + 1, n_transactions=changes, rows={A: RowCounts(insert=changes)}, received_at=seq * each_s,
            started_at=seq * each_s, committed_at=(seq + 1) * each_s, execute_s=0.9 * each_s, commit_s=0.1 * each_s,
            commit_time_first=-3600.0, commit_time_last=-3600.0,
        )
        for seq in range(n_batches)
    ]  # fmt: skip
    write(folder, "apply-1.jsonl", batches)
    return folder


def test_a_trial_of_a_part_puts_predictions_right(tmp_path: Path) -> None:
    """Small batches took longer for each change than the log shows: so they will for the whole stream."""
    log = _log(tmp_path / "log", 60, 100, 0.1)
    trial = Trial(Change(batch_transactions=25), _log(tmp_path / "trial", 120, 25, 0.04))
    asked = [Change(), Change(batch_transactions=25), Change(batch_transactions=50)]
    before, after = ([one.seconds for one in predicted_of(log, asked, some).predictions] for some in ([], [trial]))
    assert after[0] == before[0] == pytest.approx(6.0, rel=0.05)
    # Twice the part that it was.
    assert after[1] == pytest.approx(2 * 4.8, rel=0.05)
    # Half of the way there, by the size's logarithm.
    assert after[2] / after[0] == pytest.approx((after[1] / after[0]) ** 0.5)
