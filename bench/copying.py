"""The initial copy timed: the same tables brought over by parapply and by the built-in subscription, in turns.

In go a stage and options; out come seconds for each turn. A runner's clock starts with the command to start and stops
when every table is copied and joins the stream: for the built-in subscription when all are `ready` or `syncdone`, for
parapply when `init --copy` has ended. Each copies into an empty copy of the schema.
"""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from bench import compare
from bench.processes import server_cpu_s
from parapply.demo.command import Parapply
from parapply.demo.errors import DemoError
from parapply.demo.race import drop_target, make_target, write_checkpoints
from parapply.demo.stage import BANK, PUBLICATION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.copy_shapes import CopyShape
    from bench.options import Options
    from parapply.demo.stage import Stage

#: Database on the subscriber with the schema and no rows.
_EMPTY: Final = "empty_bank"
_SUBSCRIPTION: Final = "copy_race"
_POLL_S = 0.01
_TIMEOUT_S = 900.0
#: A subscription with its defaults copies two tables at a time and waits 5 s between looking for the next ones.
_TUNED: Final = {"max_sync_workers_per_subscription": "4", "wal_retrieve_retry_interval": "100ms"}
_PLAIN: Final = {"max_sync_workers_per_subscription": "2", "wal_retrieve_retry_interval": "5s"}


@dataclass(frozen=True, kw_only=True)
class CopyTurn:
    """One copy.

    Attributes:
        round_number: from 1.
        runner: the one that copied.
        total_s: until every table was copied.
        cpu_s: that both servers and the copy's own processes used for it, and no others.
        is_equal: all tables hold the same rows afterwards.
    """

    round_number: int
    runner: str
    total_s: float
    cpu_s: float
    is_equal: bool


class _Clock:
    """Time and CPU of one copy, from the call on."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._began = self._now()

    def _now(self) -> tuple[float, float]:
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        servers = sum(server_cpu_s(server.pid) for server in (self._stage.source, self._stage.target))
        return time.monotonic(), own.ru_utime + own.ru_stime + servers

    def read(self) -> tuple[float, float]:
        """Return seconds and CPU seconds so far."""
        now_s, cpu_s = self._now()
        return now_s - self._began[0], cpu_s - self._began[1]


def prepare(stage: Stage, shape: CopyShape, options: Options) -> tuple[int, int]:
    """Make the tables and their rows on the publisher, the schema on the subscriber.

    Returns:
        Number of tables, and their bytes without indexes.

    Raises:
        DemoError: a server or pgbench failed.
    """
    shape.make(stage, options.scale)
    stage.source.execute("ANALYZE", dbname=BANK)
    make_target(stage, _EMPTY)
    query = (
        "SELECT count(*), sum(pg_relation_size(oid))::bigint FROM pg_class"
        " WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
    )
    ((n_tables, size_bytes),) = stage.source.execute(query, dbname=BANK)
    return int(n_tables), int(size_bytes)


def turns(stage: Stage, options: Options) -> Iterator[CopyTurn]:
    """Let every runner copy in each round and yield what it took.

    Raises:
        DemoError: a runner failed.
    """
    every = runners(options)
    for round_number in range(1, options.rounds + 1):
        # Every other round in the opposite order: what drifts meets all alike.
        for number, (name, run) in list(enumerate(every))[:: 1 if round_number % 2 else -1]:
            dbname = f"copy_{round_number}_{number}"
            make_target(stage, dbname, template=_EMPTY)
            write_checkpoints(stage)
            total_s, cpu_s = run(stage, dbname)
            is_equal = compare.is_equal(stage, dbname)
            drop_target(stage, dbname)
            yield CopyTurn(
                round_number=round_number, runner=name, total_s=total_s, cpu_s=round(cpu_s, 2), is_equal=is_equal
            )


def runners(options: Options) -> list[tuple[str, Callable[[Stage, str], tuple[float, float]]]]:
    """Return the runners: name and what to run; parapply once for each number of connections."""
    found: list[tuple[str, Callable[[Stage, str], tuple[float, float]]]] = []
    if "built-in" in options.systems:
        found += [
            ("built-in", lambda stage, dbname: _built_in(stage, dbname, _PLAIN)),
            ("built-in, 4 workers", lambda stage, dbname: _built_in(stage, dbname, _TUNED)),
        ]
    if "parapply" in options.systems:
        numbers = [number for number in options.workers if isinstance(number, int)]
        found += [(f"parapply {number}", _parapply_with(number)) for number in numbers]
    return found


def medians(done: Sequence[CopyTurn]) -> dict[str, tuple[float, float]]:
    """Return the median seconds and CPU seconds of each runner, in the order of their first turns."""
    by_name: dict[str, list[CopyTurn]] = {}
    for turn in done:
        by_name.setdefault(turn.runner, []).append(turn)
    return {
        name: (statistics.median(turn.total_s for turn in some), statistics.median(turn.cpu_s for turn in some))
        for name, some in by_name.items()
    }


def _parapply_with(connections: int) -> Callable[[Stage, str], tuple[float, float]]:
    def run(stage: Stage, dbname: str) -> tuple[float, float]:
        command = Parapply(stage, slot=dbname, target_dbname=dbname)
        clock = _Clock(stage)
        command.call("init", "--copy", "--connections", str(connections))
        taken = clock.read()
        command.call("drop", "--yes")
        return taken

    return run


def _built_in(stage: Stage, dbname: str, settings: dict[str, str]) -> tuple[float, float]:
    stage.target.configure(settings)
    stage.target.reload()
    create = sql.SQL("CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION {} WITH (slot_name = {})").format(
        sql.Identifier(_SUBSCRIPTION), sql.Literal(stage.source.dsn(BANK)), sql.Identifier(PUBLICATION),
        sql.Identifier(dbname),
    )  # fmt: skip
    with psycopg.connect(stage.target.dsn(dbname), autocommit=True) as connection:
        clock = _Clock(stage)
        connection.execute(create)
        while _is_copying(connection):
            if clock.read()[0] > _TIMEOUT_S:
                raise DemoError(f"The built-in subscription did not copy within {_TIMEOUT_S:g} s.")
            time.sleep(_POLL_S)
        taken = clock.read()
        connection.execute(sql.SQL("DROP SUBSCRIPTION {}").format(sql.Identifier(_SUBSCRIPTION)))
    return taken


def _is_copying(connection: psycopg.Connection) -> bool:
    row = connection.execute(
        "SELECT count(*) FILTER (WHERE srsubstate NOT IN ('r', 's')) FROM pg_subscription_rel"
    ).fetchone()
    return bool(row and row[0])
