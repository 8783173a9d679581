"""Actions of operators on the daemon and its tables: run, kill, run until, pause, resume, refresh, verify, drop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from parapply import failpoints
from tests.operators.lab import Violation
from tests.operators.rules_base import IDS, PICK, OneStream

if TYPE_CHECKING:
    from tests.operators.world import World

_POINTS = tuple(sorted(failpoints.NAMES - {failpoints.DRAIN}))
_COPY_POINTS = (failpoints.COPY_PART, failpoints.COPY_BEGUN, failpoints.COPY_TABLE_DONE)
#: A daemon with --until ends within that.
_UNTIL_S = 25.0
_STEPS_BEFORE_ANEW = 5
_REFUSED_BY_TARGET = 4


def _runs(machine: OneStream) -> bool:
    return machine.world is not None and machine.world.daemon is not None


class Daemons(OneStream):
    """Rules about the daemon."""

    @precondition(lambda self: not _runs(self))
    @rule()
    def run(self) -> None:
        """Start it."""
        self.step("run", lambda world: world.start())

    @precondition(lambda self: not _runs(self))
    @rule(point=st.sampled_from(_POINTS), count=st.sampled_from([1, 1, 2, 5]))
    def run_and_be_killed(self, point: str, count: int) -> None:
        """Start one that is killed at a point."""
        armed = {"PARAPPLY_FAILPOINT": f"{point}:kill:{count}"}
        self.step("run, killed at a point", lambda world: world.start(environ=armed))

    @precondition(_runs)
    @rule()
    def stop(self) -> None:
        """Ask for its end."""
        self.step("stop", lambda world: world.stop())

    @precondition(_runs)
    @rule()
    def kill(self) -> None:
        """Kill it."""
        self.step("kill", lambda world: world.kill())

    @precondition(lambda self: not _runs(self))
    @rule()
    def run_until(self) -> None:
        """Run until where the publisher is now: both sides are equal then."""
        self.step("run until an LSN", self._run_until)

    def _run_until(self, world: World) -> None:
        self._until(world, world.route.end_of_source_lsn())

    def _until(self, world: World, until: str) -> None:
        world.start("--until", until)
        daemon = world.daemon
        assert daemon is not None
        if daemon.runs_for(_UNTIL_S):
            raise Violation(f"run --until {until} does not end:\n{daemon.log_tail()}")
        world.ended()

    @precondition(lambda self: self.world is not None)
    @rule()
    def note_time(self) -> None:
        """Look at the publisher's clock."""
        self.step("note the time", self.note)

    @precondition(lambda self: self.noted and not _runs(self))
    @rule()
    def run_until_time(self) -> None:
        """Run until the moment that was noted."""
        self.step("run until a time", lambda world: self._until(world, self.noted))


class Tables(OneStream):
    """Rules about tables of the stream."""

    @rule(pick=PICK)
    def pause(self, pick: int) -> None:
        """Take a table out."""

        def action(world: World) -> None:
            if "twice" not in self.lab.left_out or self.table(pick) not in world.told():
                world.command("pause", f"public.{self.table(pick)}")

        self.step("pause", action)

    @rule(pick=PICK)
    def resume(self, pick: int) -> None:
        """Copy it again."""
        self.step("resume", lambda world: self._copied(world, ["resume", f"public.{self.table(pick)}"], pick))

    @rule()
    def refresh(self) -> None:
        """Copy what waits."""
        self.step("refresh", lambda world: world.command("refresh"))

    @rule(pick=PICK, is_truncated=st.booleans())
    def refresh_one(self, pick: int, is_truncated: bool) -> None:
        """Copy one table."""
        words = ["refresh", "--table", f"public.{self.table(pick)}", *(["--truncate"] if is_truncated else [])]
        self.step("refresh of a table", lambda world: self._copied(world, words, pick))

    def _copied(self, world: World, words: list[str], pick: int) -> None:
        done = world.command(*words)
        if done.returncode == 0 and ("--truncate" in words or words[0] == "resume"):
            world.dirty.discard(self.table(pick))

    @rule(pick=PICK, row=IDS, point=st.sampled_from(_COPY_POINTS), is_truncated=st.booleans())
    def refresh_beside(self, pick: int, row: int, point: str, is_truncated: bool) -> None:
        """Copy one table while the publisher changes its rows."""
        table, value = self.table(pick), self.value()

        def change(world: World) -> None:
            world.on_source(f"UPDATE {table} SET v = '{value}' WHERE id = {row}")
            world.on_source(f"DELETE FROM {table} WHERE id = {row + 1}")

        def action(world: World) -> None:
            words = ["refresh", "--table", f"public.{table}", *(["--truncate"] if is_truncated else [])]
            if world.beside(words, point, lambda: change(world)) == 0 and is_truncated:
                world.dirty.discard(table)

        self.step("refresh beside changes", action)

    @rule()
    def verify(self) -> None:
        """Compare: what is called equal is equal."""

        def action(world: World) -> None:
            if world.daemon is None:
                return
            done = world.command("verify")
            if done.returncode == 0 and (found := world.silent()) and world.settle() and (found := world.silent()):
                raise Violation(f"verify says that all is equal: {done.stdout}\n{found}")

        self.step("verify", action)

    # It takes as long as ten other steps, and makes what an example begins with.
    @precondition(lambda self: self.n_since_anew >= _STEPS_BEFORE_ANEW)
    @rule(clean=st.booleans())
    def begin_anew(self, clean: bool) -> None:
        """Drop all, and init again."""

        def action(world: World) -> None:
            if clean:
                world.stop()
            world.again()
            self.n_since_anew = 0

        self.step("drop and init", action)

    # A second look sees what the first one has seen.
    @precondition(lambda self: self.last != "status")
    @rule()
    def look(self) -> None:
        """Status."""
        self.step("status", lambda world: world.status())


class States(OneStream):
    """Rules about the version of the state."""

    @rule(pick=PICK, is_later=st.booleans())
    def other_state(self, pick: int, is_later: bool) -> None:
        """Another version of parapply has been here: this one refuses the state, and changes nothing."""
        step, version = (1, "later") if is_later else (-1, "earlier")

        def action(world: World) -> None:
            world.stop()
            if not world.on_target(f"UPDATE parapply.schema_version SET version = version + {step}"):
                return
            # State and reason say that a daemon was refused.
            query = "SELECT lowest_lsn, highest_lsn, confirmed_flush_lsn FROM parapply.slots"
            before = world.target.rows(query)
            for words in (["refresh"], ["pause", f"public.{self.table(pick)}"], ["drop", "--yes"]):
                if world.command(*words).returncode != _REFUSED_BY_TARGET:
                    raise Violation(f"{words[0]} takes a state of a {version} version")
            world.start()
            daemon, world.daemon = world.daemon, None
            assert daemon is not None
            if (code := daemon.exit_code()) != _REFUSED_BY_TARGET:
                raise Violation(f"the daemon takes a state of a {version} version ({code}):\n{daemon.log_tail()}")
            if world.target.rows(query) != before:
                raise Violation(f"a state of a {version} version was changed")
            world.on_target(f"UPDATE parapply.schema_version SET version = version - {step}")

        self.step(f"state of a {version} version", action)
