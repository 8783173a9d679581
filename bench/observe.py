"""Watches the processes of one turn: finds them through both servers and has their CPU, memory and WAL noted.

In go a stage and the name of the turn's slot, subscription and database; out comes what each role has used:

- `leader`: the daemon from its start; `leader_stream`: the same process from the moment it reads the slot
- `walsender`: the publisher's process that decodes for it
- `target`: on the subscriber, the daemon's sessions or the subscription's workers
- `reader`: a program that reads the slot and applies nothing

Source: PostgreSQL manual, "pg_stat_activity", "pg_stat_subscription", "pg_replication_slots".
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Self

import psycopg

from bench import wal
from bench.processes import ProcessWatch
from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from bench.processes import Usage
    from bench.wal import Wal
    from parapply.demo.stage import Stage

#: The daemon, with Python's start.
LEADER: Final = "leader"
#: The role whose CPU is the leader's budget: the stream's, without Python's start.
LEADER_STREAM: Final = "leader_stream"

# Until the stream runs its begin is looked for; afterwards processes come and go seldom, and asking costs the servers.
_SEARCH_S = 0.01
_FIND_S = 0.2
# A process that has ended keeps its last sample: at most so much of it is missed.
_SAMPLE_S = 0.05

# The session that reads the slot, or a temporary copy of it in ranges of WAL; it is named after the slot.
_WALSENDER = """
    SELECT s.active_pid FROM pg_replication_slots AS s JOIN pg_stat_activity AS a ON a.pid = s.active_pid
     WHERE s.slot_name = %(slot)s OR (s.temporary AND a.application_name = %(name)s)
"""
_TARGET = """
    SELECT pid FROM pg_stat_activity WHERE datname = %(name)s AND starts_with(application_name, 'parapply ')
    UNION
    SELECT pid FROM pg_stat_subscription WHERE subname = %(name)s AND pid IS NOT NULL
    UNION
    SELECT pid FROM pg_stat_activity WHERE datname = %(name)s AND starts_with(backend_type, 'pglogical apply ')
"""


class Observer:
    """Watches during one turn; a context manager that holds a connection to each server."""

    def __init__(self, stage: Stage, name: str, *, slot: str = "") -> None:
        """Start with nothing observed.

        Args:
            stage: both servers.
            name: of slot, subscription and database.
            slot: its name, if it is another.
        """
        self._stage = stage
        self._names = {"name": name, "slot": slot or name}
        self._watch = ProcessWatch()
        self._is_streaming = False
        self._found_s = self._sampled_s = -1.0
        self._connections = ExitStack()
        self._began_at = ""
        #: WAL of the subscriber from `begin` until all was drained; `None` without a target.
        self.wal: Wal | None = None

    def __enter__(self) -> Self:
        """Connect to both servers.

        Raises:
            DemoError: one refused.
        """
        try:
            # In other databases than the turn's: those are copied and dropped.
            self._source = self._connections.enter_context(psycopg.connect(self._stage.source.dsn(), autocommit=True))
            self._target = self._connections.enter_context(psycopg.connect(self._stage.target.dsn(), autocommit=True))
        except psycopg.Error as error:
            self._connections.close()
            raise DemoError(f"A server refused the one who measures: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Leave both servers."""
        self._connections.close()

    def add(self, role: str, pid: int) -> None:
        """Watch a process that no server knows of, from its start."""
        self._watch.add(role, pid, from_start=True)

    def begin(self) -> None:
        """Note the subscriber's position in its WAL; nothing drains yet.

        Raises:
            DemoError: the server went away.
        """
        try:
            self._began_at = wal.position(self._target)
        except psycopg.Error as error:
            raise _gone(error) from error

    def look(self, daemon_pid: int | None, *, is_over: bool = False) -> None:
        """Find processes and take samples, each if it is time for it.

        Args:
            daemon_pid: the daemon; `None` where there is none.
            is_over: all is drained; sample now.

        Raises:
            DemoError: a server went away.
        """
        now_s = time.monotonic()
        if is_over or now_s - self._found_s >= (_FIND_S if self._is_streaming else _SEARCH_S):
            self._found_s = now_s
            self._find(daemon_pid)
        if is_over or now_s - self._sampled_s >= _SAMPLE_S:
            self._sampled_s = now_s
            self._watch.sample()
        if is_over and self._began_at:
            try:
                self.wal = wal.written_since(self._stage.target, self._target, self._began_at)
            except psycopg.Error as error:
                raise _gone(error) from error

    def usage(self) -> dict[str, Usage]:
        """Return what each role has used."""
        return self._watch.usage()

    def _find(self, daemon_pid: int | None) -> None:
        if daemon_pid:
            self._watch.add(LEADER, daemon_pid, from_start=True)
        try:
            walsenders = self._source.execute(_WALSENDER, self._names).fetchall()
            others = self._target.execute(_TARGET, self._names).fetchall() if walsenders else []
        except psycopg.Error as error:
            raise _gone(error) from error
        for (pid,) in walsenders:
            self._watch.add("walsender", pid, from_start=True)
        for (pid,) in others:
            self._watch.add("target", pid, from_start=True)
        if walsenders and daemon_pid and not self._is_streaming:
            self._watch.add(LEADER_STREAM, daemon_pid)
        self._is_streaming = self._is_streaming or bool(walsenders)


def _gone(error: psycopg.Error) -> DemoError:
    return DemoError(f"A server left the one who measures: {error}", sqlstate=error.sqlstate or "")
