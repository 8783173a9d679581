"""A huge transaction, made live while small ones commit: how soon it is visible, and what that costs others.

In goes a stage; out come turns, one for each system, round and time that the transaction is held open before its
commit. A system that applies while the transaction is in progress has done most of the work when COMMIT comes; one that
begins then makes all later commits wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench import compare
from bench.applied import read_batches
from bench.attached import attached
from bench.flow import HUGE_TABLE, flow
from bench.observe import Observer
from bench.probing import PROBE_TABLE
from parapply.demo.command import Parapply
from parapply.demo.errors import DemoError
from parapply.demo.stage import BANK, PUBLICATION

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.attached import System
    from bench.flow import Flow
    from bench.processes import Usage
    from parapply.demo.stage import Stage

_TURN: Final = "live"  # slot and database of the system whose turn it is
_TABLE = "public.items"
# A million rows come to a few times PostgreSQL's own default of 64 MB, so they are streamed. Fewer shall be, too, in as
# many chunks.
_DEFAULT_WORK_MEM_KB = 65_536
_DEFAULT_WORK_MEM_ROWS = 1_000_000
_LEAST_WORK_MEM_KB = 64


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """Options of the live measurement.

    Attributes:
        systems: those measured.
        rows: of the huge transaction.
        holds_s: seconds for which it is held open before its commit; a turn for each.
        interval_s: between two small transactions.
        rounds: each has every system; every other one in the opposite order.
    """

    systems: tuple[System, ...]
    rows: int
    holds_s: tuple[float, ...] = (0.0,)
    interval_s: float = 0.02
    rounds: int = 2

    @property
    def work_mem_kb(self) -> int:
        """The publisher's logical_decoding_work_mem: larger transactions are streamed."""
        wanted = self.rows * _DEFAULT_WORK_MEM_KB // _DEFAULT_WORK_MEM_ROWS
        return max(_LEAST_WORK_MEM_KB, min(_DEFAULT_WORK_MEM_KB, wanted))


@dataclass(frozen=True, kw_only=True)
class Applying:
    """How parapply applied the huge transaction, from its own records.

    Attributes:
        mode: `streamed`, `spilled`, `large` or such; the apply log's.
        spilled_because: why a follower gave way; empty if none did.
        attempts: 1 where nothing was repeated.
        execute_s: from its worker's start until its last statement had succeeded.
        wait_turn_s: until everything earlier had committed.
        commit_s: its COMMIT.
    """

    mode: str
    spilled_because: str
    attempts: int
    execute_s: float
    wait_turn_s: float
    commit_s: float


@dataclass(frozen=True, kw_only=True)
class LiveTurn:
    """One system, one round, one time of being held open.

    Attributes:
        round_number: from 1.
        system: its name.
        hold_s: for which the huge transaction was held open.
        flow: what was seen.
        is_equal: whether every table was equal afterwards.
        usage: by role, as `Observer` names them.
        applying: `None` for the built-in subscription, which keeps no records.
    """

    round_number: int
    system: str
    hold_s: float
    flow: Flow
    is_equal: bool
    usage: dict[str, Usage]
    applying: Applying | None


def measure(
    stage: Stage, options: LiveOptions, on_turn: Callable[[LiveTurn], None] = lambda _turn: None
) -> list[LiveTurn]:
    """Measure every system, one at a time, each from a slot of its own into a fresh database.

    Args:
        stage: two servers without the bank; it is made here. Afterwards it stays, changed on the publisher, which does
            not wait for its disk any more.
        options: what and how.
        on_turn: is given every turn when it is over.

    Raises:
        DemoError: a server or a system failed, or something was not seen in time.
    """
    _prepare(stage, options)
    turns: list[LiveTurn] = []
    for number in range(1, options.rounds + 1):
        for hold_s in options.holds_s:
            for system in options.systems if number % 2 else reversed(options.systems):
                turn = _take_turn(stage, options, system, number, hold_s)
                turns.append(turn)
                on_turn(turn)
    return turns


def _prepare(stage: Stage, options: LiveOptions) -> None:
    for server in (stage.source, stage.target):
        server.execute(f"CREATE DATABASE {BANK}")
        for table in (PROBE_TABLE, HUGE_TABLE):
            server.execute(table, dbname=BANK)
    stage.source.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES", dbname=BANK)
    # How long a disk takes is no part of what is measured; when the walsender is woken stays the same.
    stage.source.configure({"fsync": False, "logical_decoding_work_mem": f"{options.work_mem_kb}kB"})
    stage.source.reload()


def _take_turn(stage: Stage, options: LiveOptions, system: System, number: int, hold_s: float) -> LiveTurn:
    # No system has a slot now. The target is made again.
    stage.source.execute("TRUNCATE items, probe", dbname=BANK)
    directory = stage.directory / f"applylog-live-{len(list(stage.directory.glob('applylog-live-*')))}"
    log = Parapply(stage, slot=_TURN).log
    # One file for the daemons of all turns.
    before_bytes = log.stat().st_size if log.exists() else 0
    settings = [f"applylog.directory={directory}"]
    with Observer(stage, _TURN) as observer:
        with attached(stage, system, _TURN, settings=settings) as running:

            def check() -> None:
                running.check()
                observer.look(running.daemon_pid)

            seen = flow(
                stage.source.dsn(BANK), stage.target.dsn(_TURN), rows=options.rows, hold_s=hold_s,
                interval_s=options.interval_s, check=check,
            )  # fmt: skip
            observer.look(running.daemon_pid, is_over=True)
            usage = observer.usage()
            is_equal = compare.is_equal(stage, _TURN)
        applying = None if system.settings is None else read_applying(directory, log.read_bytes()[before_bytes:])
    return LiveTurn(
        round_number=number, system=system.name, hold_s=hold_s, flow=seen, is_equal=is_equal, usage=usage,
        applying=applying,
    )  # fmt: skip


def read_applying(directory: Path, log: bytes) -> Applying:
    """Return how the huge transaction was applied.

    Args:
        directory: of the apply log of a daemon that has ended.
        log: what it wrote to its operational log, as JSON lines.

    Raises:
        DemoError: it is not in the apply log, once.
    """
    records = [record for record in read_batches(directory) if _TABLE in record.rows]
    if len(records) != 1:
        raise DemoError(f"The apply log has the huge transaction {len(records)} times.")
    record = records[0]
    return Applying(
        mode=record.mode,
        spilled_because=_spilled_because(record.xids, log),
        attempts=record.attempts,
        execute_s=record.execute_s,
        wait_turn_s=record.wait_turn_s,
        commit_s=record.commit_s,
    )


def _spilled_because(xids: tuple[int, ...], log: bytes) -> str:
    """Return why the follower of one of these transactions gave way; empty if none did."""
    for line in log.splitlines():
        # Text that the interpreter itself prints is no JSON.
        if line.startswith(b"{"):
            event: dict[str, Any] = msgspec.json.decode(line)
            if event.get("event") == "stream_spilled" and event.get("xid") in xids:
                return str(event.get("reason"))
    return ""
