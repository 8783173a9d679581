"""How fast a daemon reads a publisher: small and large rows, by TCP, Unix socket and a longer way, by both readers.

Run with ``python -m bench.micro.reading`` (``--help``). Each row of the table is one backlog of one-row transactions,
read by a daemon of its own into a database of its own, with the stream and with ranges of WAL in turn.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import psutil
from psycopg.conninfo import make_conninfo
from rich.console import Console
from rich.table import Table

from bench.proxy import delayed_port
from parapply.demo.command import Parapply
from parapply.demo.race import create_slot, drop_target, make_target, mark_first, mark_last, measure, write_checkpoints
from parapply.demo.stage import BANK, Interrupts, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

_WAYS: Final = ("tcp", "unix", "link")
_READERS: Final = ("off", "auto")
#: Seconds each way: 20 ms from a request to its answer.
_LINK_DELAY_S: Final = 0.01
_SETTINGS: Final = {"wal_level": "logical", "max_wal_size": "16GB", "synchronous_commit": "off"}
#: One transaction for each row: what a COMMIT inside a procedure ends.
_LOAD: Final = """
CREATE PROCEDURE fill(first int, n int, size_bytes int) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN first .. first + n - 1 LOOP
        INSERT INTO filled VALUES (i, substr(repeat(md5(i::text), size_bytes / 32 + 1), 1, size_bytes));
        COMMIT;
    END LOOP;
END $$
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-bytes", type=int, nargs="+", default=[50, 8000], help="of a row")
    parser.add_argument("--backlog-mb", type=int, default=100, help="of rows, at most 300,000 of them")
    parser.add_argument("--way", choices=_WAYS, nargs="+", default=list(_WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    table = Table(
        "row bytes", "rows", "way", "reader", "median s", "best s", "publisher CPU s", "leader CPU s", "first s"
    )
    for size_bytes in options.size_bytes:
        n_rows = min(300_000, options.backlog_mb * 1_000_000 // max(size_bytes, 300))
        for way in options.way:
            with ExitStack() as stack:
                interrupts = stack.enter_context(Interrupts())
                stage = stack.enter_context(
                    Stage(interrupts, name="reading", settings=_SETTINGS, is_local=way == "unix")
                )
                _fill(stage, size_bytes, n_rows)
                turns: dict[str, list[tuple[float, float, float, float]]] = {reader: [] for reader in _READERS}
                for i in range(options.rounds):
                    for reader in _READERS:
                        turns[reader].append(_turn(stage, way, reader, f"reading_{i}_{reader}"))
                for reader, found in turns.items():
                    total_s, publisher_s, leader_s, first_s = (
                        statistics.median(column) for column in zip(*found, strict=True)
                    )
                    best_s = min(each[0] for each in found)
                    table.add_row(
                        f"{size_bytes:,}", f"{n_rows:,}", way, reader,
                        *(f"{value:.2f}" for value in (total_s, best_s, publisher_s, leader_s, first_s)),
                    )  # fmt: skip
        Console(width=140).print(table)


def _fill(stage: Stage, size_bytes: int, n_rows: int) -> None:
    stage.fill_bank(1)
    for server in (stage.source, stage.target):
        server.execute("CREATE TABLE filled (id int PRIMARY KEY, body text)", dbname=BANK)
        server.execute("ALTER TABLE filled ALTER body SET STORAGE external", dbname=BANK)
    for i in range(8):
        for reader in _READERS:
            create_slot(stage, f"reading_{i}_{reader}")
    mark_first(stage)
    stage.source.execute(_LOAD, dbname=BANK)
    stage.source.execute(f"CALL fill(1, {n_rows}, {size_bytes})", dbname=BANK)
    mark_last(stage)


@contextmanager
def _source_dsn(stage: Stage, way: str) -> Iterator[str]:
    if way != "link":
        yield stage.source_dsn()
        return
    with delayed_port("127.0.0.1", stage.source.port, _LINK_DELAY_S) as port:
        yield make_conninfo(stage.source_dsn(), host="127.0.0.1", port=port)


def _turn(stage: Stage, way: str, reader: str, slot: str) -> tuple[float, float, float, float]:
    make_target(stage, slot)
    try:
        with _source_dsn(stage, way) as dsn:
            runner = Parapply(
                stage, slot=slot, target_dbname=slot, source_dsn=dsn, settings=[f"source.catch_up={reader}"]
            )
            runner.call("init")
            write_checkpoints(stage)
            before_s = _cpu_s(stage.source.pid)
            first_s, total_s = measure(stage, slot, runner.start, runner.check)
            publisher_s = _cpu_s(stage.source.pid) - before_s
            assert runner.pid is not None
            times = psutil.Process(runner.pid).cpu_times()
            runner.stop()
            runner.call("drop", "--yes")
            return total_s, publisher_s, times.user + times.system, first_s
    finally:
        drop_target(stage, slot)


def _cpu_s(pid: int) -> float:
    """Return what a server's processes have used, also those that have ended."""
    server = psutil.Process(pid)
    own = server.cpu_times()
    total_s: float = own.user + own.system + own.children_user + own.children_system
    for child in server.children(recursive=True):
        times = child.cpu_times()
        total_s += times.user + times.system
    return total_s


if __name__ == "__main__":
    main()
