"""How good the what-if is: the same stream with 2, 4, 8 and 16 workers, and what the log of 4 says about the others.

In go a stage for each kind of target; out come cells: measured and predicted seconds, from the first batch's start to
the last commit, as the records have both.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from bench.catchup import prepare
from bench.compare import is_equal
from bench.logged import recorded_of
from bench.options import FAST, Disk, Options
from bench.workloads import LARGE_ROWS, WORKLOADS
from parapply.analysis.changes import ORDERS, Change
from parapply.analysis.duck import DuckEngine
from parapply.analysis.job import ReportRequest, make_report
from parapply.analysis.prediction import Log
from parapply.analysis.progress import Silent
from parapply.applylog_schema import Record, read_record
from parapply.demo.command import Parapply
from parapply.demo.errors import DemoError
from parapply.demo.load import DemoLoad
from parapply.demo.race import create_slot, drain_with_parapply, drop_target, make_target
from parapply.demo.stage import BANK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.disk import SlowDisk
    from bench.options import Order, Sync
    from parapply.demo.stage import Stage

_SLOT: Final = "backlog"
_TURN: Final = "turn"
_MESSAGE: Final = "SELECT pg_logical_emit_message(true, 'parapply bench', '')"
_TIMEOUT_S: Final = 120
#: Of the daemon whose log predicts, and of all.
FROM_WORKERS: Final = 4
WORKERS: Final = (2, 4, 8, 16)
#: Largest error that is small enough.
GOOD: Final = 0.15


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A target, by what it is slow with.

    Attributes:
        name: for the command line and files.
        text: for people.
        workload: of `WORKLOADS`.
        transactions: of the backlog; of a live load the transactions of a second.
        scale: of the tables.
        live_s: seconds of a load that is applied as it comes; 0: a backlog.
        disk: of the subscriber.
        sync: synchronous_commit of the daemon's sessions.
        settings: `key=value` for the daemon.
    """

    name: str
    text: str
    workload: str = "simple-update"
    transactions: int
    scale: int = 10
    live_s: int = 0
    disk: Disk = FAST
    sync: Sync = "off"
    settings: tuple[str, ...] = ()

    @property
    def options(self) -> Options:
        """Options that its servers are filled with."""
        return Options(transactions=self.transactions, scale=self.scale, large_rows=LARGE_ROWS, systems=("parapply",))

    def shortened(self, part: float) -> Kind:
        """Return it with a part of its load."""
        if self.live_s:
            return replace(self, live_s=max(1, round(self.live_s * part)))
        return replace(self, transactions=max(1, round(self.transactions * part)))


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind(
            name="slow-reads", text="each read of a page 150 us longer, 32 MB of shared buffers, batches of 500",
            transactions=40_000, disk=Disk(read_us=150), settings=("apply.max_batch_transactions=500",),
        ),
        Kind(
            name="slow-flushes", text="each flush 8 ms longer, synchronous_commit on, batches of 100",
            transactions=50_000, scale=1, disk=Disk(sync_us=8_000), sync="on",
            settings=("apply.max_batch_transactions=100",),
        ),
        Kind(name="processors", text="inserts into a table with six indexes", workload="indexes", transactions=250_000),
        Kind(name="live", text="500 transactions a second as they come", transactions=500, live_s=8),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One kind of target, order and number of workers.

    Attributes:
        measured_s: of the round during which least else ran on the machine.
        rounds_s: of each.
        others: processors that everything else took then, on average.
        predicted_s: from such a log of `FROM_WORKERS`.
        least_s: of the interval, as what follows.
        most_s: as the page shows it.
        limit: what the prediction names.
    """

    kind: str
    order: Order
    workers: int
    measured_s: float
    rounds_s: tuple[float, ...]
    others: float
    predicted_s: float
    least_s: float
    most_s: float
    limit: str

    @property
    def error(self) -> float:
        """Part by which the prediction is too long."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_good(self) -> bool:
        """Return whether the error is small enough."""
        return abs(self.error) <= GOOD

    @property
    def is_within(self) -> bool:
        """Return whether the interval holds the measured time."""
        return self.least_s <= self.measured_s <= self.most_s

    def document(self) -> dict[str, Any]:
        """Return it for a file."""
        return {**asdict(self), "error": self.error, "is_good": self.is_good, "is_within": self.is_within}


def measure(  # noqa: PLR0913  one caller
    stage: Stage,
    kind: Kind,
    *,
    rounds: int,
    disk: SlowDisk | None,
    say: Callable[[str], None],
    keep: Path | None = None,
) -> tuple[list[Cell], str]:
    """Apply the same stream with each number of workers in both orders, and compare.

    Args:
        stage: with the kind's disk.
        kind: of target.
        rounds: turns of each.
        disk: of the subscriber.
        say: gets a line for each turn.
        keep: a directory that gets the apply logs; None: they go with the stage.

    Returns:
        The cells, and what limits by the report on the log of `FROM_WORKERS` with the order kept.

    Raises:
        DemoError: a server or the daemon failed, or tables differ.
    """
    options = kind.options
    source = _Live(stage, kind) if kind.live_s else _Backlog(stage, kind)
    source.prepare(options)
    folder = keep or stage.directory
    slowed = disk.slowed if disk is not None else None
    for number in range(rounds):
        for order in ORDERS:
            # A drift of the machine affects few and many workers alike.
            for workers in WORKERS if number % 2 == 0 else reversed(WORKERS):
                directory = _log_of(folder, kind, order, workers, number)
                directory.mkdir(parents=True)
                settings = [
                    *WORKLOADS[kind.workload].settings, *kind.settings, f"target.synchronous_commit={kind.sync}",
                    f"applylog.directory={directory}", f"apply.workers={workers}", f"apply.commit_order={order}",
                ]  # fmt: skip
                source.apply(settings, slowed)
                say(f"{kind.name:13} {order:9} {workers:3} workers  {_measured_s(_records(directory)):6.2f} s")
    source.end()
    return compare(kind, folder)


def compare(kind: Kind, folder: Path) -> tuple[list[Cell], str]:
    """Compare what logs of `measure` say with what they measured; the same as that returns.

    Raises:
        DemoError: logs are missing.
    """
    logs: dict[tuple[Order, int], list[list[Record]]] = defaultdict(list)
    for order in ORDERS:
        for workers in WORKERS:
            number = 0
            while (log := _log_of(folder, kind, order, workers, number)).is_dir():
                logs[order, workers].append(_records(log))
                number += 1
            if not number:
                raise DemoError(f"There is no log {log}.", hint="--keep DIR of the measuring run makes it")
    cells = [cell for order in ORDERS for cell in _cells(kind, order, logs)]
    return cells, _verdict(_log_of(folder, kind, ORDERS[0], FROM_WORKERS, 0))


def _log_of(folder: Path, kind: Kind, order: Order, workers: int, number: int) -> Path:
    return folder / f"whatif-{kind.name}-{order}-{workers}-{number}"


def _verdict(log: Path) -> str:
    with TemporaryDirectory(prefix="parapply-report-") as out, closing(DuckEngine("1g", None)) as engine:
        request = ReportRequest(log=str(log), out=out, what_if=None)
        return " ".join([said.words for said in make_report(engine, request, Silent()).verdicts.values()])


def _cells(kind: Kind, order: Order, logs: dict[tuple[Order, int], list[list[Record]]]) -> list[Cell]:
    from_log = min(logs[order, FROM_WORKERS], key=_others)
    log = Log(*recorded_of(from_log))
    cells = []
    for workers in WORKERS:
        found, quietest = log.predict(Change(workers=workers)), min(logs[order, workers], key=_others)
        cells.append(
            Cell(
                kind=kind.name, order=order, workers=workers, measured_s=_measured_s(quietest),
                rounds_s=tuple(_measured_s(records) for records in logs[order, workers]), others=_others(quietest),
                predicted_s=found.seconds, least_s=found.least_s, most_s=found.most_s, limit=found.limit,
            )
        )  # fmt: skip
    return cells


def _others(records: list[Record]) -> float:
    """Return how many processors everything else on the machine took on average; the servers' own helpers count."""
    seconds = [one for one in recorded_of(records)[1] if one.processors]
    length_s = sum(one.length_s for one in seconds)
    taken_s = sum(one.busy_s - one.sessions_s - one.sender_s - one.leader_cpu_s for one in seconds)
    return taken_s / length_s if length_s else 0.0


def _measured_s(records: list[Record]) -> float:
    recorded, _ = recorded_of(records)
    return max(one.committed_s for one in recorded) - min(one.started_s for one in recorded)


def _records(directory: Path) -> list[Record]:
    return [read_record(line) for file in sorted(directory.iterdir()) for line in file.read_bytes().splitlines()]


class _Backlog:
    """The same backlog for each turn, from a copy of the slot into a copy of the tables."""

    def __init__(self, stage: Stage, kind: Kind) -> None:
        self._stage = stage
        self._kind = kind
        self._end_lsn = ""

    def prepare(self, options: Options) -> None:
        self._end_lsn = prepare(self._stage, WORKLOADS[self._kind.workload], options).end_lsn

    def apply(self, settings: list[str], slowed: Callable[[Disk], Any] | None) -> None:
        stage = self._stage
        stage.source.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [_SLOT, _TURN], dbname=BANK)
        make_target(stage, _TURN)
        with slowed(self._kind.disk) if slowed else nullcontext():
            # With relaxed order the last transaction may be there before others are.
            drain_with_parapply(
                stage, slot=_TURN, dbname=_TURN, settings=settings, then=lambda daemon: _wait(daemon, self._end_lsn)
            )
        if not is_equal(stage, _TURN):
            raise DemoError("The tables differ.")
        drop_target(stage, _TURN)

    def end(self) -> None:
        """Do nothing: the stage takes it all."""


class _Live:
    """One slot and one set of tables for all turns; a load for each."""

    def __init__(self, stage: Stage, kind: Kind) -> None:
        self._stage = stage
        self._kind = kind

    def prepare(self, options: Options) -> None:
        stage = self._stage
        stage.fill_bank(options.scale)
        create_slot(stage, _TURN)
        make_target(stage, _TURN)
        Parapply(stage, slot=_TURN, target_dbname=_TURN).call("init")

    def apply(self, settings: list[str], slowed: Callable[[Disk], Any] | None) -> None:
        stage, kind = self._stage, self._kind
        daemon = Parapply(stage, slot=_TURN, target_dbname=_TURN, settings=settings)
        with slowed(kind.disk) if slowed else nullcontext():
            daemon.start()
            self._wait(daemon)
            DemoLoad(stage, "simple-update", clients=4, limit=f"--time={kind.live_s}", rate=kind.transactions).wait()
            self._wait(daemon)
            daemon.stop()

    def _wait(self, daemon: Parapply) -> None:
        """Return when what is committed by now is on the subscriber."""
        ((lsn,),) = self._stage.source.execute(_MESSAGE, dbname=BANK)
        daemon.check()
        _wait(daemon, str(lsn))

    def end(self) -> None:
        if not is_equal(self._stage, _TURN):
            raise DemoError("The tables differ.")


def _wait(daemon: Parapply, lsn: str) -> None:
    daemon.call("wait", "--lsn", lsn, "--timeout", str(_TIMEOUT_S))
