"""The same backlog drained by parapply and by the built-in subscription, each alone.

In goes a stage with a slot for each runner, made before the backlog; out come the times. A runner's clock starts with
the command to start, so its start-up counts, and stops when the backlog's last row is visible to a reader.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import psycopg
from psycopg import sql

from parapply.demo.command import Parapply
from parapply.demo.errors import DemoError
from parapply.demo.load import DemoLoad
from parapply.demo.stage import BANK, PUBLICATION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from parapply.demo.command import Comparison
    from parapply.demo.load import Script
    from parapply.demo.stage import Stage

# Often enough for runs of one second, seldom enough to cost little compared with the apply.
_POLL_S = 0.002
# A backlog of a million transactions takes a minute or two on a slow machine.
_DRAIN_TIMEOUT_S = 600.0
# A daemon that has nothing to apply catches up in a second.
_START_TIMEOUT_S = 60
_MESSAGE = "SELECT pg_logical_emit_message(true, 'parapply demo', '')"
_FIRST, _LAST = 1, 2
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Drained:
    """One runner's result."""

    first_s: float  # until the backlog's first row was visible: mostly start-up
    total_s: float  # until its last row was visible


class Watch(Protocol):
    """Watches the processes while they drain; it must cost little compared with what is measured."""

    def begin(self) -> None:
        """Note where the servers are: both have written their checkpoints, and nothing drains yet."""

    def look(self, daemon_pid: int | None, *, is_over: bool = False) -> None:
        """Sample, or do nothing if it is not time.

        Args:
            daemon_pid: the daemon; `None` where there is none.
            is_over: all is drained and every process still there; sample now.
        """


class _NoWatch:
    def begin(self) -> None:
        """Do nothing."""

    def look(self, daemon_pid: int | None, *, is_over: bool = False) -> None:
        """Do nothing."""


_NO_WATCH = _NoWatch()


def make_backlog(stage: Stage, *, clients: int, limit: str, script: Script = "simple-update") -> int:
    """Commit pgbench's transactions between two marked rows, and return how many."""
    before = _count(stage)
    mark_first(stage)
    DemoLoad(stage, script, clients=clients, limit=limit).wait()
    mark_last(stage)
    return _count(stage) - before


def _count(stage: Stage) -> int:
    ((transactions,),) = stage.source.execute("SELECT count(*) FROM pgbench_history", dbname=BANK)
    return int(transactions)


def mark_first(stage: Stage) -> None:
    """Commit the row before a backlog."""
    stage.source.execute("INSERT INTO race_line VALUES (%s, 'first')", [_FIRST], dbname=BANK)


def mark_last(stage: Stage) -> None:
    """Commit the row after a backlog."""
    stage.source.execute("INSERT INTO race_line VALUES (%s, 'last')", [_LAST], dbname=BANK)


def make_target(stage: Stage, dbname: str, *, template: str = BANK) -> None:
    """Make a database on the subscriber as a copy of another, without parapply's state in it."""
    create = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy")
    stage.target.execute(create.format(sql.Identifier(dbname), sql.Identifier(template)))
    stage.target.execute("SET client_min_messages = warning; DROP SCHEMA IF EXISTS parapply CASCADE", dbname=dbname)


def drop_target(stage: Stage, dbname: str) -> None:
    """Drop a database on the subscriber."""
    stage.target.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(dbname)))


def create_slot(stage: Stage, name: str) -> None:
    """Make a logical slot on the publisher, as CREATE SUBSCRIPTION would."""
    stage.source.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name], dbname=BANK)


def drain_with_parapply(  # noqa: PLR0913  one for each thing that differs
    stage: Stage,
    *,
    slot: str,
    dbname: str,
    settings: Sequence[str],
    environment: Mapping[str, str] = _NO_VARIABLES,
    target_port: int | None = None,
    watch: Watch = _NO_WATCH,
    then: Callable[[Parapply], None] = lambda _: None,
) -> Drained:
    """Drain a slot with the daemon, started as a user starts it, and drop the slot.

    Args:
        stage: the servers.
        slot: with the backlog.
        dbname: database on the subscriber, in the state the slot starts from.
        settings: `key=value`, as for `--set`.
        environment: as for `Parapply`.
        target_port: as for `Parapply`.
        watch: watches the processes in the meantime.
        then: called with the daemon still running, when the clock has stopped.
    """
    runner = Parapply(
        stage, slot=slot, target_dbname=dbname, target_port=target_port, settings=settings, environment=environment
    )
    runner.call("init")

    def check() -> None:
        runner.check()
        watch.look(runner.pid)

    first_s, total_s = measure(stage, dbname, runner.start, check, watch=watch)
    watch.look(runner.pid, is_over=True)
    then(runner)
    runner.stop()
    runner.call("drop", "--yes")
    return Drained(first_s=first_s, total_s=total_s)


def drain_with_subscription(  # noqa: PLR0913  one for each thing that differs
    stage: Stage,
    *,
    slot: str,
    dbname: str,
    synchronous_commit: str = "off",
    streaming: str | None = None,
    watch: Watch = _NO_WATCH,
) -> Drained:
    """Drain a slot with the built-in subscription, and drop both.

    Source: PostgreSQL manual, "CREATE SUBSCRIPTION".

    Args:
        stage: the servers.
        slot: with the backlog; the subscription has its name.
        dbname: database on the subscriber, in the state the slot starts from.
        synchronous_commit: `off` (PostgreSQL's default for subscriptions) or `on`.
        streaming: `off`, `on` or `parallel`; the subscriber's default when `None`.
        watch: watches the processes in the meantime.
    """
    name = sql.Identifier(slot)
    create = _create_subscription(stage, name, synchronous_commit, streaming)
    stage.target.execute(create, dbname=dbname)

    def enable() -> None:
        stage.target.execute(sql.SQL("ALTER SUBSCRIPTION {} ENABLE").format(name), dbname=dbname)

    first_s, total_s = measure(stage, dbname, enable, lambda: watch.look(None), watch=watch)
    watch.look(None, is_over=True)
    stage.target.execute(sql.SQL("ALTER SUBSCRIPTION {} DISABLE").format(name), dbname=dbname)
    stage.target.execute(sql.SQL("DROP SUBSCRIPTION {}").format(name), dbname=dbname)
    return Drained(first_s=first_s, total_s=total_s)


def _create_subscription(
    stage: Stage, name: sql.Identifier, synchronous_commit: str, streaming: str | None
) -> sql.Composed:
    options = [("slot_name", name), ("synchronous_commit", sql.Literal(synchronous_commit))]
    if streaming:
        options.append(("streaming", sql.Literal(streaming)))
    return sql.SQL(
        "CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION {} WITH (create_slot = false, copy_data = false,"
        " enabled = false, {})"
    ).format(
        name,
        sql.Literal(stage.source_dsn()),
        sql.Identifier(PUBLICATION),
        sql.SQL(", ").join(sql.SQL("{} = {}").format(sql.SQL(option), value) for option, value in options),
    )


def verify_target(stage: Stage, *, slot: str, dbname: str) -> list[Comparison]:
    """Have `parapply verify` compare a database on the subscriber that is up to date, by whatever system.

    It needs a running daemon, so one runs for the time, with its own slot; there is nothing to apply.
    """
    runner = Parapply(stage, slot=slot, target_dbname=dbname)
    runner.call("init")
    runner.start()
    # Later than the slot's begin, so a daemon that reaches it has begun.
    ((lsn,),) = stage.source.execute(_MESSAGE, dbname=BANK)
    runner.call("wait", "--lsn", lsn, "--timeout", str(_START_TIMEOUT_S))
    tables = runner.verify()
    runner.stop()
    runner.call("drop", "--yes")
    return tables


def write_checkpoints(stage: Stage) -> None:
    """Have both servers write what they hold: it must not be flushed during one runner's turn."""
    for server in (stage.source, stage.target):
        server.execute("CHECKPOINT")


def measure(
    stage: Stage, dbname: str, start: Callable[[], object], check: Callable[[], None], *, watch: Watch = _NO_WATCH
) -> tuple[float, float]:
    """Start a runner and return the seconds until the first and until the last row of the backlog were visible."""
    write_checkpoints(stage)
    first_s = math.inf
    try:
        with psycopg.connect(stage.target.dsn(dbname), autocommit=True) as connection:
            watch.begin()
            started_s = time.monotonic()
            start()
            while True:
                row = connection.execute("SELECT coalesce(max(position), 0) FROM race_line").fetchone()
                elapsed_s, position = time.monotonic() - started_s, row[0] if row else 0
                if position >= _FIRST:
                    first_s = min(first_s, elapsed_s)
                if position >= _LAST:
                    return first_s, elapsed_s
                if elapsed_s > _DRAIN_TIMEOUT_S:
                    raise DemoError(f"The backlog was not drained within {_DRAIN_TIMEOUT_S:g} s.")
                check()
                time.sleep(_POLL_S)
    except psycopg.Error as error:
        raise DemoError(f"The subscriber said: {error}", sqlstate=error.sqlstate or "") from error
