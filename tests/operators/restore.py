"""Servers that are put back to an older state, and a standby that is the publisher and takes over.

Each has servers of its own, kept for the run: a restored server takes all of its databases back.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from psycopg.conninfo import make_conninfo

from tests.fixtures.databases import Database, create_end, drop_database
from tests.fixtures.route import Route
from tests.fixtures.standby import make_standby
from tests.operators.lab import Violation
from tests.operators.layouts import FAMILIES
from tests.operators.rules_base import OneStream
from tests.operators.rules_daemon import Daemons
from tests.operators.rules_rows import Rows
from tests.operators.world import FAST, World, both

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.demo.server import PgServer

_SIDES = st.sampled_from(["source", "target"])


class Restored(Rows, Daemons):
    """One stream; either server may be put back to a copy of its files."""

    def __init__(self) -> None:
        """Begin an example."""
        super().__init__()
        self._saved: set[str] = set()

    @initialize(pair=st.tuples(st.integers(0, 3), st.integers(0, 3)), saved=st.sampled_from(["source", "target"]))
    def begin_example(self, pair: tuple[int, int], saved: str) -> None:
        """Make the pair, copy, and save one of them."""
        if self.lab.is_over:
            return
        majors = self.lab.majors
        with self._told():
            servers = [
                self.lab.kept(f"{side}_{majors[number % len(majors)]}", majors[number % len(majors)])
                for side, number in zip(("restored_source", "restored_target"), pair, strict=True)
            ]
            source, target = create_end(servers[0], "source"), create_end(servers[1], "target")
            route = Route(
                source=source, target=target, settings=FAST, source_dsn=source.dsn, target_dsn=target.dsn,
                slot=f"app_{source.dbname[-8:]}",
            )  # fmt: skip
            world = self.world = World(lab=self.lab, route=route, quiet=self.quiet, script=["# servers of their own"])
            both(world, FAMILIES[0].statements)
            self.tables = list(FAMILIES[0].listed)
            world.on_source("CREATE PUBLICATION pub FOR ALL TABLES")
            done = world.init()
            assert done.returncode == 0, done.stderr
            self._save(world, saved)

    def _server(self, side: str) -> tuple[Database, PgServer]:
        assert self.world is not None
        database = self.world.source if side == "source" else self.world.target
        return database, database.server  # type: ignore[return-value]

    @rule(side=_SIDES)
    def save(self, side: str) -> None:
        """Copy the files of a server that is stopped."""
        self.step("save", lambda world: self._save(world, side))

    def _save(self, world: World, side: str) -> None:
        self.quiet()
        database, server = self._server(side)
        database.forget()
        world.script.append(f"{side}: stop; cp -a DATA COPY; start")
        server.stop()
        saved = server.data_dir.with_name("saved")
        shutil.rmtree(saved, ignore_errors=True)
        subprocess.run(["cp", "-a", str(server.data_dir), str(saved)], check=True)
        server.start()
        self._saved.add(side)

    @precondition(lambda self: self._saved)
    @rule(rows=st.sampled_from([0, 1, 600]))
    def restore(self, rows: int) -> None:
        """Put the copy back; then the publisher may write at once."""

        def action(world: World) -> None:
            side = min(self._saved)
            self.quiet()
            self._saved.discard(side)
            database, server = self._server(side)
            database.forget()
            world.script.append(f"{side}: stop at once; put COPY back; start; {rows} transactions on the source")
            server.stop("immediate")
            shutil.rmtree(server.data_dir)
            server.data_dir.with_name("saved").rename(server.data_dir)
            server.start()
            if rows:
                world.source.execute(
                    f"DO $$ BEGIN FOR i IN 1..{rows} LOOP INSERT INTO plain VALUES (10000 + i, 'later')"
                    " ON CONFLICT DO NOTHING; COMMIT; END LOOP; END $$"
                )

        self.step("restore", action)


class Takeover(Rows, Daemons):
    """A built-in subscription, in whose place the stream comes (docs/how-to/replace-a-subscription.md)."""

    is_taken: bool = False
    _is_two_phase: bool = False

    @initialize(pair=st.tuples(st.integers(0, 3), st.integers(0, 3)), two_phase=st.booleans())
    def begin_example(self, pair: tuple[int, int], two_phase: bool) -> None:
        """Make the pair and the subscription."""
        if self.lab.is_over:
            return
        majors = self.lab.majors
        with self._told():
            source = create_end(self.lab.server("source", majors[pair[0] % len(majors)]), "source")
            target = create_end(self.lab.server("target", majors[pair[1] % len(majors)]), "target")
            settings: dict[str, str | float] = {**FAST, **({"source.two_phase": "true"} if two_phase else {})}
            route = Route(
                source=source, target=target, settings=settings, source_dsn=source.dsn, target_dsn=target.dsn,
                slot=f"app_{source.dbname[-8:]}",
            )  # fmt: skip
            world = self.world = World(lab=self.lab, route=route, script=[f"# two_phase {two_phase}"])
            world.quiet = self.quiet
            both(world, FAMILIES[0].statements)
            self.tables = list(FAMILIES[0].listed)
            world.on_source("CREATE PUBLICATION pub FOR ALL TABLES")
            mode = "true" if two_phase else "false"
            if majors[pair[0] % len(majors)] < 15:
                mode = "false"
            world.on_source(f"SELECT pg_create_logical_replication_slot('{route.slot}', 'pgoutput', false, {mode})")
            world.on_target(
                f"CREATE SUBSCRIPTION {route.slot} CONNECTION '{source.dsn}' PUBLICATION pub WITH (create_slot = false,"
                f" slot_name = '{route.slot}', copy_data = false, two_phase = {mode})"
            )

    def step(self, name: str, action: Callable[[World], object]) -> None:
        """Do a step; there is no daemon of ours as long as there is the subscription."""
        if self.is_taken or not name.startswith("run"):
            super().step(name, action)

    def _caught_up(self, world: World) -> None:
        lsn = world.route.end_of_source_lsn()
        world.source.wait_until(
            f"SELECT confirmed_flush_lsn >= '{lsn}' FROM pg_replication_slots WHERE slot_name = '{world.route.slot}'",
            40,
        )

    @precondition(lambda self: not self.is_taken)
    @rule()
    def take_over(self) -> None:
        """The stream comes in the place of the subscription, to the letter."""
        self.is_taken = True
        self.step("take over", self._take_over)

    def _take_over(self, world: World) -> None:
        slot = world.route.slot
        self._caught_up(world)
        world.on_target(f"ALTER SUBSCRIPTION {slot} DISABLE")
        world.target.wait_until(f"SELECT pid IS NULL FROM pg_stat_subscription WHERE subname = '{slot}'")
        query = (
            f"SELECT pg_replication_origin_progress('pg_' || oid, true) FROM pg_subscription WHERE subname = '{slot}'"
        )
        ((lsn,),) = world.target.rows(query)
        world.on_target(f"ALTER SUBSCRIPTION {slot} SET (slot_name = NONE)")
        world.on_target(f"DROP SUBSCRIPTION {slot}")
        if lsn:
            world.on_source(f"SELECT pg_replication_slot_advance('{slot}', '{lsn}')")
        # A prepared transaction is to be decided first, where the refusal says so.
        for is_first in (True, False):
            # Not `World.command`, which ends applications' open work before a slot is made: this slot exists.
            done = world.command("init", "--despite", "slot_read", is_quiet=False)
            if done.returncode == 0:
                break
            if not is_first or "prepared" not in done.stderr:
                raise Violation(f"init does not adopt the slot: {done.stderr}")
            self.quiet()
            if "by a subscription that was dropped" in done.stderr:
                self._begin_again(world)
                break
        world.start()

    def _begin_again(self, world: World) -> None:
        """Do what the refusal says of a dropped subscription's prepared transactions."""
        query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND gid LIKE 'pg_gid_%'"
        for (gid,) in world.target.rows(query):
            world.on_target(f"ROLLBACK PREPARED '{gid}'")
        world.on_source(f"SELECT pg_drop_replication_slot('{world.route.slot}')")
        done = world.command("init", "--copy", "--truncate", is_quiet=False)
        if done.returncode:
            raise Violation(f"the hint does not lead to a slot: {done.stderr}")

    def heal(self) -> None:
        """Take over, if that was not done."""
        assert self.world is not None
        if not self.is_taken:
            self.is_taken = True
            self._take_over(self.world)
        super().heal()


class Standby(OneStream):
    """A standby is the publisher, from which the daemon reads; it may be promoted. One server pair for each example."""

    def __init__(self) -> None:
        """Begin an example."""
        super().__init__()
        self._servers: list[PgServer] = []
        self._is_promoted = False
        self._primary: Any = None

    @initialize(pick=st.integers(0, 3))
    def begin_example(self, pick: int) -> None:
        """Make primary, standby and target; copy from the standby."""
        majors = [major for major in self.lab.majors if major >= 16]
        if self.lab.is_over or not majors:
            return
        major = majors[pick % len(majors)]
        with self._told():
            primary, standby = self.lab.own_server("primary", major), self.lab.own_server("standby", major)
            self._servers = [primary, standby]
            before = create_end(primary, "source")
            before.execute("CREATE TABLE plain (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR ALL TABLES")
            before.forget()
            make_standby(primary, standby)
            self._primary = Database(dbname=before.dbname, server=primary)
            source = Database(dbname=before.dbname, server=standby)
            target = create_end(self.lab.server("target", major), "target")
            target.execute("CREATE TABLE plain (id int PRIMARY KEY, v text)")
            route = Route(
                source=source, target=target, settings=FAST, target_dsn=target.dsn,
                source_dsn=make_conninfo(source.dsn), slot=f"app_{before.dbname[-8:]}",
            )  # fmt: skip
            world = self.world = World(lab=self.lab, route=route, script=[f"# a standby of {major} is the publisher"])
            world.quiet, world.is_promised = lambda: None, True
            done = self._with_snapshots(world, "init", "--copy")
            assert done.returncode == 0, done.stderr

    def _with_snapshots(self, world: World, *words: str) -> Any:  # noqa: ANN401
        """Run a command that makes a slot on the standby, while the primary logs its running transactions."""
        ends = threading.Event()

        def log() -> None:
            while not ends.wait(0.1):
                self._primary.execute("SELECT pg_log_standby_snapshot()")

        thread = threading.Thread(target=log)
        thread.start()
        try:
            return world.command(*words)
        finally:
            ends.set()
            thread.join()

    def _write(self, world: World, text: str) -> None:
        world.script.append(f"{'promoted' if self._is_promoted else 'primary'}: {text}")
        (world.source if self._is_promoted else self._primary).execute(text)

    def do(self, name: str, action: Any) -> None:  # noqa: ANN401
        """Do a step, and look whether the target has all that the publisher had then."""
        if self.world is None or self._is_failed or self.lab.is_over:
            return
        self.lab.counts[f"step {name}"] += 1
        with self._told():
            action(self.world)
            self._look(self.world)

    def _look(self, world: World, timeout_s: float = 15.0) -> None:
        if world.daemon is None:
            return
        now = (world.source if self._is_promoted else self._primary).rows("SELECT id, v FROM plain ORDER BY 1")
        try:
            expected = ", ".join(repr(f"{key} {value}") for key, value in now)
            world.target.wait_until(
                "SELECT coalesce(array_agg(id || ' ' || v ORDER BY id), '{}')"
                f" = ARRAY[{expected}]::text[] FROM plain", timeout_s,
            )  # fmt: skip
        except AssertionError:
            log = world.daemon.log_tail()
            if not world.runs():
                world.ended()
            raise Violation(f"not there after {timeout_s:g} s: {now}\n{log}") from None

    @rule(row=st.integers(1, 8))
    def insert(self, row: int) -> None:
        """A row."""
        text = f"INSERT INTO plain VALUES ({row}, '{self.value()}') ON CONFLICT (id) DO UPDATE SET v = excluded.v"
        self.do("insert", lambda world: self._write(world, text))

    @precondition(lambda self: not self._is_promoted)
    @rule()
    def promote(self) -> None:
        """The standby takes over."""

        def action(world: World) -> None:
            world.script.append("primary: stop; standby: promote")
            self._servers[0].stop()
            self._servers[1].execute("SELECT pg_promote(true, 60)")
            self._is_promoted = True

        self.do("promote", action)

    # One rule: Hypothesis leaves out some of the rules in each example.
    @rule(what=st.sampled_from(["run", "stop", "kill"]))
    def daemon(self, what: str) -> None:
        """Start, end or kill the daemon."""
        self.do(what, {"run": World.start, "stop": World.stop, "kill": World.kill}[what])

    @precondition(lambda self: not self._is_promoted)
    @rule()
    def until_time(self) -> None:
        """Run until a moment that the standby has not come to yet."""

        def action(world: World) -> None:
            world.stop()
            self._servers[1].execute("SELECT pg_wal_replay_pause()")
            self._write(
                world, f"INSERT INTO plain VALUES (9, '{self.value()}') ON CONFLICT (id) DO UPDATE SET v = excluded.v"
            )
            ((until, value),) = self._primary.rows(
                "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') || '+00',"
                " (SELECT v FROM plain WHERE id = 9)"
            )
            world.start("--until", until)
            daemon = world.daemon
            assert daemon is not None
            ended = not daemon.runs_for(4.0)
            self._servers[1].execute("SELECT pg_wal_replay_resume()")
            if ended and not daemon.exit_code() and world.target.rows("SELECT v FROM plain WHERE id = 9") != [(value,)]:
                raise Violation(f"run --until {until} ends with 0, and a row that was committed before is not there")
            if not ended:
                # On a standby only something later says that the moment has passed.
                later = f"INSERT INTO plain VALUES (10, '{self.value()}') ON CONFLICT (id) DO UPDATE SET v = excluded.v"
                self._write(world, later)
                if daemon.runs_for(20.0):
                    raise Violation("run --until a time does not end")
            world.daemon = None

        self.do("run until a time", action)

    def teardown(self) -> None:
        """End: the daemon runs once more, and every row is present."""
        world = self.world
        if world is None:
            return
        try:
            if not self._is_failed and not self.lab.is_over:
                with self._told():
                    world.script.append("# the end")
                    world.start()
                    self._look(world, 30.0)
                self.lab.counts["examples"] += 1
        finally:
            if world.daemon:
                world.daemon.end()
            for server in self._servers:
                server.cleanup()
            drop_database(world.target)
            self.world = None
