"""A cut-over there and back: killed, undone, with commands that do not belong to it, and tables that are added.

The model knows each row that was acknowledged by the side that clients write to. None of them ever goes, and the other
side has them as soon as its daemon has come to the end.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from parapply import failpoints
from parapply.demo.errors import DemoError
from tests.fixtures.route import Route
from tests.operators.lab import Violation
from tests.operators.rules_base import OneStream
from tests.operators.world import World, both, make_world

if TYPE_CHECKING:
    from collections.abc import Callable

_POINTS = ("", "", *failpoints.CUTOVER_NAMES)
_DDL = {"ddl.apply": "true"}


class Switch(OneStream):
    """`ahead` leads from node 0 to node 1, `back` from node 1 to node 0; clients write to `active`."""

    def __init__(self) -> None:
        """Begin an example."""
        super().__init__()
        self.active = 0
        self.rows: dict[str, dict[int, str]] = {"t": {}}
        self.back: World | None = None
        self._number = 0
        self._has_ahead = True

    @initialize(pair=st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def begin_example(self, pair: tuple[int, int]) -> None:
        """Make both nodes, copy, and start the daemon."""
        if self.lab.is_over:
            return
        majors = self.lab.majors
        with self._told():
            chosen = majors[pair[0] % len(majors)], majors[pair[1] % len(majors)]
            world = self.world = make_world(self.lab, chosen, settings=_DDL)
            world.ddl_way, world.is_tolerant = "queue", True
            both(world, ["CREATE TABLE t (id int PRIMARY KEY, v text)"])
            world.on_source("CREATE PUBLICATION pub FOR ALL TABLES")
            done = world.init()
            assert done.returncode == 0, done.stderr
            route = world.route
            turned = Route(
                source=route.target, target=route.source, settings={**route.settings, "ddl.apply": "false"},
                source_dsn=route.target_dsn, target_dsn=route.source_dsn, slot=f"{route.slot}_back",
                publication="pub_back",
            )  # fmt: skip
            self.back = World(lab=self.lab, route=turned, script=world.script, is_tolerant=True)
            self._folder = tempfile.TemporaryDirectory()
            self._path = Path(self._folder.name) / "back.toml"
            lines = [
                "[source]", f'dsn = "{turned.source_dsn}"', f'slot = "{turned.slot}"', 'publications = ["pub_back"]',
                "[target]", f'dsn = "{turned.target_dsn}"',
            ]  # fmt: skip
            self._path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            world.start()

    def _ends(self) -> tuple[World, World]:
        assert self.world is not None
        assert self.back is not None
        return self.world, self.back

    def _write(self, table: str) -> bool:
        """A client writes a row to the side that it knows."""
        ahead, _ = self._ends()
        self._number += 1
        key, value = self._number, self.value()
        done = (ahead.on_target if self.active else ahead.on_source)(f"INSERT INTO {table} VALUES ({key}, '{value}')")
        if done:
            self.rows[table][key] = value
        return done

    def do(self, name: str, action: Callable[[], object]) -> None:
        """Do a step, and look at both nodes."""
        if self.world is None or self._is_failed or self.lab.is_over:
            return
        self.lab.counts[f"step {name}"] += 1
        with self._told():
            action()
            self._look()

    def _look(self) -> None:
        ahead, back = self._ends()
        passive = (back if self.active else ahead) if (back if self.active else ahead).daemon else None
        is_settled = self._settled(passive) if passive else False
        told = passive.told() if passive and is_settled else {}
        for table, rows in self.rows.items():
            for node in (self.active, *([1 - self.active] if is_settled and table not in told else [])):
                held = self._held(node, table)
                lost = {key: value for key, value in rows.items() if held.get(key) != value}
                if lost:
                    raise Violation(f"{table} on node {node} lost {lost}; it holds {held}")

    def _settled(self, world: World) -> bool:
        """Wait for the daemon of the way in use; a source behind its fence takes no marks, so there is nothing more."""
        try:
            return world.settle()
        except DemoError:
            return False

    def _held(self, node: int, table: str) -> dict[int, str]:
        ahead, _ = self._ends()
        database = ahead.target if node else ahead.source
        return dict(database.rows(f"SELECT id, v FROM {table}"))

    @rule(table=st.integers(0, 2))
    def write(self, table: int) -> None:
        """A client writes."""
        names = list(self.rows)
        self.do("row", lambda: self._write(names[table % len(names)]))

    @rule(point=st.sampled_from(_POINTS))
    def cutover(self, point: str) -> None:
        """Cut over, perhaps killed at a step."""
        self.do("cut-over", lambda: self._cutover(point))

    @rule(point=st.sampled_from(_POINTS))
    def back_again(self, point: str) -> None:
        """Go back, perhaps killed at a step."""
        self.do("back", lambda: self._cutover(point, "--back"))

    @rule()
    def undo(self) -> None:
        """Take a cut-over back."""
        self.do("undo", lambda: self._cutover("", "--undo"))

    @rule(point=st.sampled_from(failpoints.CUTOVER_NAMES[:4]))
    def table_meanwhile(self, point: str) -> None:
        """A table comes through the queue while a cut-over is under way."""
        name = f"made_{len(self.rows)}"

        def come() -> None:
            ahead, _ = self._ends()
            if not self.active and ahead.on_source(
                f"SELECT parapply.replicate_ddl('CREATE TABLE {name} (id int PRIMARY KEY, v text)')"
            ):
                self.rows[name] = {}
                self._write(name)

        self.do("table during a cut-over", lambda: self._cutover(point, beside=come))

    def _cutover(self, point: str, *words: str, beside: Callable[[], None] | None = None) -> str:
        """Cut over, go on with it or take it back; return what was said of a refusal."""
        ahead, back = self._ends()
        if not words and not self.active:
            ahead.start()
        if "--back" in words and self.active:
            back.start()
        for world in (ahead, back):
            world.source.forget()
            world.target.forget()
        command = ["cutover", "--reverse", str(self._path), "--timeout", "10", *words]
        if beside is not None:
            code, said = ahead.beside(command, point, beside), ""
        else:
            done = ahead.command(*command, environ={"PARAPPLY_FAILPOINT": f"{point}:kill"} if point else None)
            code, said = done.returncode, done.stderr
        # Killed behind the opening: the other side has taken over.
        is_open = code == -signal.SIGKILL and point in {"cutover_ending", "cutover_done"}
        if (code == 0 or is_open) and "--undo" not in words:
            self.active = 0 if "--back" in words else 1
        for world in (ahead, back):
            if world.daemon is not None and not world.daemon.runs_for(0.0 if code else 5.0):
                world.daemon = None
        return said

    def _undo(self) -> str:
        """Take back what is under way, in whichever direction, or go on with it where it is too late for that."""
        said = self._cutover("", "--undo")
        if "in the other direction" not in said:
            return said
        back = ["--back"] if "--back`" in said else []
        return self._cutover("", *back, *(["--undo"] if "--undo takes it back" in said else []))

    @rule()
    def run_ahead(self) -> None:
        """Start the daemon of the stream ahead: it may be refused."""
        self.do("run", lambda: self._run(0))

    @rule()
    def run_back(self) -> None:
        """Start the daemon of the way back."""
        self.do("run", lambda: self._run(1))

    def _run(self, number: int) -> None:
        world = self._ends()[number]
        if world.daemon is not None:
            return
        world.start()
        daemon = world.daemon
        assert daemon is not None
        if not daemon.runs_for(0.5):
            world.script.append(f"# refused: {daemon.lines[-1][:300] if daemon.lines else ''}")
            world.daemon = None

    @rule()
    def drop_ahead(self) -> None:
        """`drop` with the configuration of the stream ahead."""

        def action() -> None:
            ahead, _ = self._ends()
            if ahead.daemon is not None:
                ahead.daemon.end()
                ahead.daemon = None
            if ahead.command("drop", "--yes").returncode == 0:
                self._has_ahead = False

        self.do("drop", action)

    @rule(is_truncated=st.booleans())
    def refresh(self, is_truncated: bool) -> None:
        """Copy a table again, with the configuration of the stream ahead."""
        more = ["--truncate"] if is_truncated else []
        self.do("refresh", lambda: self._ends()[0].command("refresh", "--table", "public.t", *more))

    @rule()
    def pause_and_resume(self) -> None:
        """The same by pausing the table."""

        def action() -> None:
            ahead, _ = self._ends()
            ahead.command("pause", "public.t")
            ahead.command("resume", "public.t")

        self.do("pause and resume", action)

    def teardown(self) -> None:
        """End: clients can write to the side that they know, and nothing keeps WAL once both are dropped."""
        if self.world is None:
            return
        ahead = self.world
        try:
            if not self._is_failed and not self.lab.is_over:
                with self._told():
                    self._finish()
                self.lab.counts["examples"] += 1
        finally:
            self._end_daemons()
            for database in (ahead.source, ahead.target):
                database.server.execute(f'ALTER DATABASE "{database.dbname}" RESET ALL')
            ahead.close()
            self._folder.cleanup()
            self.world = None

    def _end_daemons(self) -> None:
        for world in (self.world, self.back):
            if world is not None and world.daemon is not None:
                world.daemon.end()
                world.daemon = None

    def _finish(self) -> None:
        ahead, back = self._ends()
        ahead.script.append("# the end")
        self._look()
        if not self._write("t"):
            # A daemon that was started too early is in the way, as the refusal says.
            self._end_daemons()
            said = self._undo()
            if not self._write("t"):
                said = self._cutover("")
                if not self._write("t"):
                    raise Violation(f"clients cannot write, and neither --undo nor the cut-over helps: {said}")
        self._look()
        self._end_daemons()
        for world in (back, ahead):
            if "is under way" in world.command("drop", "--yes").stderr:
                # It may start a daemon.
                self._undo()
                self._end_daemons()
                world.command("drop", "--yes")
        for database in (ahead.source, ahead.target):
            left = database.rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
            if left:
                raise Violation(f"a slot is left that no command knows: {left}")
