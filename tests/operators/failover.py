"""The target fails over to its standby, and the daemon is pointed to that one.

State and rows come from one WAL, so they agree on the standby whatever it lacks. One that is synchronous lacks nothing
that the publisher was told. One that is not may: then the daemon has it sent again, or refuses, and a copy heals.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.fixtures.databases import Database, create_end
from tests.fixtures.route import Route
from tests.fixtures.standby import make_standby
from tests.operators.layouts import FAMILIES
from tests.operators.rules_daemon import Daemons
from tests.operators.rules_rows import Rows
from tests.operators.world import FAST, World, both

if TYPE_CHECKING:
    from parapply.demo.server import PgServer


class Failover(Rows, Daemons):
    """One stream into a primary that has a standby. One server pair for each example."""

    def __init__(self) -> None:
        """Begin an example."""
        super().__init__()
        self._servers: list[PgServer] = []
        self._is_synchronous = False
        self._is_over = False

    @initialize(pair=st.tuples(st.integers(0, 3), st.integers(0, 3)), is_synchronous=st.booleans())
    def begin_example(self, pair: tuple[int, int], is_synchronous: bool) -> None:
        """Make primary and standby, and copy."""
        if self.lab.is_over:
            return
        majors = self.lab.majors
        major = majors[pair[1] % len(majors)]
        with self._told():
            primary, standby = self.lab.own_server("primary", major), self.lab.own_server("standby", major)
            self._servers = [primary, standby]
            source = create_end(self.lab.server("source", majors[pair[0] % len(majors)]), "source")
            target = create_end(primary, "target")
            route = Route(
                source=source, target=target, settings=FAST, source_dsn=source.dsn, target_dsn=target.dsn,
                slot=f"app_{source.dbname[-8:]}",
            )  # fmt: skip
            script = [f"# the target has a standby, {'synchronous' if is_synchronous else 'asynchronous'}"]
            world = self.world = World(lab=self.lab, route=route, quiet=self.quiet, script=script)
            both(world, FAMILIES[0].statements)
            self.tables = list(FAMILIES[0].listed)
            world.on_source("CREATE PUBLICATION pub FOR ALL TABLES")
            world.forget("target")
            make_standby(primary, standby)
            self._is_synchronous = is_synchronous
            if is_synchronous:
                primary.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
                primary.execute("SELECT pg_reload_conf()")
            done = world.init()
            assert done.returncode == 0, done.stderr

    @precondition(lambda self: not self._is_over)
    @rule(rows=st.sampled_from([0, 1, 300]), is_killed=st.booleans())
    def fail_over(self, rows: int, is_killed: bool) -> None:
        """The primary is gone; the standby misses some transactions, if the primary did not wait for it."""
        self.step("failover of the target", lambda world: self._fail_over(world, rows, is_killed=is_killed))

    def _fail_over(self, world: World, rows: int, *, is_killed: bool) -> None:
        self._is_over = True
        primary, standby = self._servers
        if not self._is_synchronous:
            world.script.append("standby: stop")
            standby.stop()
        if rows:
            one = "INSERT INTO plain VALUES (10000 + i, 'late')"
            world.on_source(f"DO $$ BEGIN FOR i IN 1..{rows} LOOP {one}; COMMIT; END LOOP; END $$")
            world.settle()
        if is_killed:
            world.kill()
        world.forget("target")
        world.script.append("primary: stop at once; standby: start, promote; target.dsn leads there")
        primary.stop("immediate")
        if not is_killed:
            world.stop()
        standby.start()
        standby.execute("SELECT pg_promote(true, 60)")
        target = Database(dbname=world.target.dbname, server=standby)
        world.route = replace(world.route, target=target, target_dsn=target.dsn)
        world.is_promised = self._is_synchronous
        world.start()

    def heal(self) -> None:
        """Fail over, if that was not done."""
        super().heal()
        assert self.world is not None
        if not self._is_over:
            self.world.start()
            self._fail_over(self.world, 1, is_killed=True)

    def teardown(self) -> None:
        """End the example, and with it its servers."""
        try:
            super().teardown()
        finally:
            for server in self._servers:
                server.cleanup()
