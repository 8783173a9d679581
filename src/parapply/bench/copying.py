"""The initial copy timed: the same tables brought over by parapply and by the built-in subscription, in turns.

In go a stage and options; out come seconds for each turn. A runner's clock starts when it is told to start and stops
when every table is copied and joins the stream: for the built-in subscription when all are `ready` or `syncdone`, for
parapply when `init --copy` has ended. Each copies into an empty copy of the schema.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from parapply.demo.command import Parapply
from parapply.demo.errors import DemoError
from parapply.demo.race import compare_target, drop_target, make_target, write_checkpoints
from parapply.demo.stage import BANK, PUBLICATION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from parapply.bench.options import Options
    from parapply.demo.stage import Stage

#: Small tables beside those of pgbench, and the rows of each.
SMALL_TABLES: Final = 40
_SMALL_ROWS: Final = 1000
#: Database on the subscriber with the schema and no rows.
_EMPTY: Final = "empty_bank"
_SUBSCRIPTION: Final = "copy_race"
_POLL_S = 0.01
_TIMEOUT_S = 900.0
#: What a subscription does by itself copies two tables at a time and waits 5 s between looking for the next ones.
_TUNED: Final = {"max_sync_workers_per_subscription": "4", "wal_retrieve_retry_interval": "100ms"}
_PLAIN: Final = {"max_sync_workers_per_subscription": "2", "wal_retrieve_retry_interval": "5s"}


@dataclass(frozen=True, kw_only=True)
class CopyTurn:
    """One copy.

    Attributes:
        round_number: from 1.
        runner: who copied.
        total_s: until every table was copied.
        is_equal: all tables hold the same rows afterwards.
    """

    round_number: int
    runner: str
    total_s: float
    is_equal: bool


def prepare(stage: Stage, options: Options) -> int:
    """Make the tables and their rows on the publisher, the schema on the subscriber; return the bytes of the tables.

    Raises:
        DemoError: a server or pgbench failed.
    """
    stage.fill_bank(options.scale)
    small = "; ".join(
        f"CREATE TABLE small_{number} (id int PRIMARY KEY, v text, at timestamptz)" for number in range(SMALL_TABLES)
    )
    for server in (stage.source, stage.target):
        server.execute(small, dbname=BANK)
    for number in range(SMALL_TABLES):
        stage.source.execute(
            f"INSERT INTO small_{number} SELECT i, md5(i::text), now() FROM generate_series(1, {_SMALL_ROWS}) AS i",  # noqa: S608  numbers
            dbname=BANK,
        )
    stage.source.execute("ANALYZE", dbname=BANK)
    stage.target.execute("TRUNCATE pgbench_accounts, pgbench_branches, pgbench_tellers, pgbench_history", dbname=BANK)
    make_target(stage, _EMPTY)
    query = "SELECT sum(pg_relation_size(oid))::bigint FROM pg_class WHERE relkind = 'r' AND relnamespace = 2200"
    return int(stage.source.execute(query, dbname=BANK)[0][0])


def turns(stage: Stage, options: Options) -> Iterator[CopyTurn]:
    """Let every runner copy in each round and yield what it took.

    Raises:
        DemoError: a runner failed.
    """
    every = runners(options)
    for round_number in range(1, options.rounds + 1):
        for number, (name, run) in enumerate(every):
            dbname = f"copy_{round_number}_{number}"
            make_target(stage, dbname, template=_EMPTY)
            write_checkpoints(stage)
            total_s = run(stage, dbname)
            is_equal = all(table.is_equal for table in compare_target(stage, dbname))
            drop_target(stage, dbname)
            yield CopyTurn(round_number=round_number, runner=name, total_s=total_s, is_equal=is_equal)


def runners(options: Options) -> list[tuple[str, Callable[[Stage, str], float]]]:
    """Return who copies: name and what to run; parapply once for each number of connections."""
    found: list[tuple[str, Callable[[Stage, str], float]]] = []
    if "built-in" in options.systems:
        found += [
            ("built-in", lambda stage, dbname: _built_in(stage, dbname, _PLAIN)),
            ("built-in, 4 workers", lambda stage, dbname: _built_in(stage, dbname, _TUNED)),
        ]
    if "parapply" in options.systems:
        found += [(f"parapply {number}", _parapply_with(number)) for number in options.workers]
    return found


def medians(done: Sequence[CopyTurn]) -> dict[str, float]:
    """Return the median seconds of each runner, in the order of their turns."""
    names = dict.fromkeys(turn.runner for turn in done)
    return {name: statistics.median(turn.total_s for turn in done if turn.runner == name) for name in names}


def _parapply_with(connections: int) -> Callable[[Stage, str], float]:
    def run(stage: Stage, dbname: str) -> float:
        command = Parapply(stage, slot=dbname, target_dbname=dbname)
        started_s = time.monotonic()
        command.call("init", "--copy", "--connections", str(connections))
        total_s = time.monotonic() - started_s
        command.call("drop", "--yes")
        return total_s

    return run


def _built_in(stage: Stage, dbname: str, settings: dict[str, str]) -> float:
    stage.target.configure(settings)
    stage.target.reload()
    create = sql.SQL("CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION {} WITH (slot_name = {})").format(
        sql.Identifier(_SUBSCRIPTION), sql.Literal(stage.source.dsn(BANK)), sql.Identifier(PUBLICATION),
        sql.Identifier(dbname),
    )  # fmt: skip
    with psycopg.connect(stage.target.dsn(dbname), autocommit=True) as connection:
        started_s = time.monotonic()
        connection.execute(create)
        while _is_copying(connection):
            if time.monotonic() - started_s > _TIMEOUT_S:
                raise DemoError(f"The built-in subscription did not copy within {_TIMEOUT_S:g} s.")
            time.sleep(_POLL_S)
        total_s = time.monotonic() - started_s
        connection.execute(sql.SQL("DROP SUBSCRIPTION {}").format(sql.Identifier(_SUBSCRIPTION)))
    return total_s


def _is_copying(connection: psycopg.Connection) -> bool:
    row = connection.execute(
        "SELECT count(*) FILTER (WHERE srsubstate NOT IN ('r', 's')) FROM pg_subscription_rel"
    ).fetchone()
    return bool(row and row[0])
