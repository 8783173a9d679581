"""Counts from parapply's own records of one turn: batches, their waits, and how often one had to be repeated.

In go the directory of a finished run's apply log and its operational log; out come sums. Reads files, nothing else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from parapply.applylog_schema import BatchRecord, Record
from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from parapply.applylog_schema import WaitedFor


@dataclass(frozen=True, kw_only=True)
class Applied:
    """Sums over the batches of one turn, or of several.

    Attributes:
        batches: target transactions.
        transactions: source transactions in them, the two marks included.
        retries: attempts beyond each batch's first.
        retried_batches: batches with such attempts.
        in_order_batches: such batches that were applied row by row at the head.
        retry_reasons: why they were: SQLSTATE, `row count` and such.
        waiting_batches: batches that had to wait for another before they began.
        waited_s: seconds of that, all together.
        waits: kind, table and index or constraint of what they, or their late keys, waited for last.
        late_keys: keys whose changes were put off until the turn to commit.
    """

    batches: int
    transactions: int
    retries: int
    retried_batches: int
    in_order_batches: int
    retry_reasons: dict[str, int]
    waiting_batches: int
    waited_s: float
    waits: dict[str, int]
    late_keys: int

    @property
    def retries_per_100_batches(self) -> float:
        """Retries per hundred batches; 0 without a batch."""
        return 100 * self.retries / self.batches if self.batches else 0.0


def read_applied(directory: Path, log: bytes) -> Applied:
    """Sum up a finished run.

    Args:
        directory: of its apply log; nothing else was written there.
        log: what it wrote to its operational log, as JSON lines.

    Raises:
        DemoError: a file of the apply log is still open, so that records may be missing.
    """
    return sum_up(read_batches(directory), _retry_reasons(log))


def read_batches(directory: Path) -> list[BatchRecord]:
    """Return all records of a finished run's apply log; nothing else was written there.

    Raises:
        DemoError: a file of it is still open, so that records may be missing.
    """
    if unfinished := sorted(directory.glob("*.open")):
        raise DemoError(f"The daemon has ended and left its apply log open: {unfinished[0].name}.")
    files = sorted(directory.glob("apply-*.jsonl"))
    return [record for file in files for record in read_records(file.read_bytes())]


def read_records(lines: bytes) -> list[BatchRecord]:
    """Return the records of batches in an apply log's file.

    Raises:
        DemoError: a line is no such record.
    """
    try:
        records = msgspec.json.Decoder(Record).decode_lines(lines)
    except msgspec.MsgspecError as error:
        raise DemoError(f"The apply log cannot be read: {error}") from error
    return [record for record in records if isinstance(record, BatchRecord)]


def sum_up(records: Sequence[BatchRecord], retry_reasons: dict[str, int]) -> Applied:
    """Return the sums over records."""
    waits = Counter(_wait_text(record.waited_for) for record in records if record.waited_for)
    return Applied(
        batches=len(records),
        transactions=sum(record.n_transactions for record in records),
        retries=sum(record.attempts - 1 for record in records),
        retried_batches=sum(record.attempts > 1 for record in records),
        in_order_batches=sum(record.mode == "rows" for record in records),
        retry_reasons=retry_reasons,
        waiting_batches=sum(record.wait_dependency_s > 0 for record in records),
        waited_s=round(sum(record.wait_dependency_s for record in records), 3),
        waits=dict(waits.most_common()),
        late_keys=sum(record.late_keys for record in records),
    )


def _wait_text(wait: WaitedFor) -> str:
    return " ".join(word for word in (wait.kind, wait.table, wait.name) if word)


def total(turns: Iterable[Applied]) -> Applied:
    """Return the sums over several turns: one retry more or less says little about a single one."""
    each = list(turns)
    return Applied(
        batches=sum(one.batches for one in each),
        transactions=sum(one.transactions for one in each),
        retries=sum(one.retries for one in each),
        retried_batches=sum(one.retried_batches for one in each),
        in_order_batches=sum(one.in_order_batches for one in each),
        retry_reasons=_added(one.retry_reasons for one in each),
        waiting_batches=sum(one.waiting_batches for one in each),
        waited_s=round(sum(one.waited_s for one in each), 3),
        waits=_added(one.waits for one in each),
        late_keys=sum(one.late_keys for one in each),
    )


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    added: Counter[str] = Counter()
    for one in counts:
        added.update(one)
    return dict(added.most_common())


def _retry_reasons(log: bytes) -> dict[str, int]:
    reasons: Counter[str] = Counter()
    for line in log.splitlines():
        # Text that the interpreter itself prints is no JSON.
        if line.startswith(b"{"):
            event: dict[str, Any] = msgspec.json.decode(line)
            if event.get("event") == "batch_retried":
                reasons[str(event.get("reason"))] += 1
    return dict(reasons.most_common())
