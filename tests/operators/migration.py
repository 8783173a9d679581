"""A migration step by step, killed at any point and given again, while rows change."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from parapply import failpoints
from tests.fixtures.databases import create_end
from tests.fixtures.route import Route
from tests.operators.lab import Violation
from tests.operators.layouts import FAMILIES, Family, dumpable
from tests.operators.rules_daemon import Tables
from tests.operators.rules_rows import Rows
from tests.operators.world import FAST, World

if TYPE_CHECKING:
    import subprocess

_POINTS = ("", "", *failpoints.MIGRATE_NAMES, *failpoints.COPY_NAMES)
#: Steps that a migration may end at; the last is before the daemon is started.
_STEPS = ("schema", "copy", "indexes", "constraints", "analyze")
_LAST = "analyze"
#: A step that a hint names.
_ONLY = re.compile(r"`parapply migrate --only ([a-z-]+)`")


class Migration(Rows, Tables):
    """A target that is empty at first; the daemon comes once the migration has come to its end."""

    is_done: bool = False
    # A slot that another command has made is not the migration's, and before that there is none.
    begin_anew = look = None  # type: ignore[assignment]

    @initialize(
        families=st.lists(st.sampled_from(FAMILIES), min_size=1, max_size=3, unique=True),
        pair=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    )
    def begin_example(self, families: list[Family], pair: tuple[int, int]) -> None:
        """Make the publisher's tables, with rows."""
        if self.lab.is_over:
            return
        families = [one for one in families if one.name not in self.lab.left_out] or [FAMILIES[0]]
        majors = self.lab.majors
        families = dumpable(families, (majors[pair[0] % len(majors)], majors[pair[1] % len(majors)]))
        with self._told():
            source = create_end(self.lab.server("source", majors[pair[0] % len(majors)]), "source")
            target = create_end(self.lab.server("target", majors[pair[1] % len(majors)]), "bare_target")
            route = Route(
                source=source, target=target, settings=FAST, source_dsn=source.dsn, target_dsn=target.dsn,
                slot=f"app_{source.dbname[-8:]}",
            )  # fmt: skip
            world = self.world = World(lab=self.lab, route=route, quiet=self.quiet, script=["# migrate"])
            for family in families:
                for text in family.statements:
                    world.on_source(text)
                self.tables += family.listed
            for number, name in enumerate(self.tables, 3):
                world.on_source(f"INSERT INTO {name} (id, v) SELECT g, 'copied' FROM generate_series(1, {number}) AS g")
            world.on_source("CREATE PUBLICATION pub FOR ALL TABLES")

    def _migrate(self, world: World, point: str, *words: str) -> subprocess.CompletedProcess[str]:
        self.quiet()
        program = world.source.server.program("pg_dump")  # type: ignore[union-attr]
        armed = {"PARAPPLY_FAILPOINT": f"{point}:kill"} if point else None
        return world.command(
            "migrate", "--pg-bin", str(program.parent), "--daemon-log", os.devnull, *words, environ=armed
        )

    @rule(point=st.sampled_from(_POINTS), last=st.sampled_from(_STEPS))
    def migrate(self, point: str, last: str) -> None:
        """Go on with the migration as far as a step, perhaps killed."""

        def action(world: World) -> None:
            done = self._migrate(world, point, "--to", last)
            if done.returncode == 0 and last == _LAST:
                self.is_done = True

        self.step("migrate", action)

    @rule()
    def run(self) -> None:
        """Start the daemon, once there is a slot with all tables."""
        if self.is_done:
            self.step("run", lambda world: world.start())

    @rule()
    def kill(self) -> None:
        """Kill the daemon."""
        self.step("kill", lambda world: world.kill())

    def heal(self) -> None:
        """Bring the migration to its end: the same command, as often as its answer says so."""
        super().heal()
        world = self.world
        assert world is not None
        said = ""
        for _ in range(4):
            if self.is_done:
                return
            world.kill()
            done = self._migrate(world, "", "--to", _LAST)
            self.is_done, said = done.returncode == 0, done.stderr
            if "`parapply resume`" in said:
                for name in sorted(name for name, state in world.told().items() if state == "paused"):
                    world.command("resume", f"public.{name}")
            if found := _ONLY.search(said):
                self._migrate(world, "", "--only", found[1])
        if not self.is_done:
            raise Violation(f"the migration does not come to its end: {said}")
