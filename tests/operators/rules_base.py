"""Common parts of all rules of one stream: the example's world, its tables, and how a step ends."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from tests.operators import lab

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from tests.operators.world import World

#: Picks one of the existing objects; small numbers come first when a failure is shrunk.
PICK = st.integers(0, 7)
IDS = st.integers(1, 8)


class OneStream(RuleBasedStateMachine):
    """A machine with one stream.

    Attributes:
        world: of the example; none before it is made, and none where the run is over.
    """

    world: World | None = None
    #: A moment of the publisher's clock that an operator has noted.
    noted: str = ""
    #: Name of the last step, and how many there were since the slot was made.
    last: str = ""
    n_since_anew: int = 0

    def __init__(self) -> None:
        """Begin an example."""
        super().__init__()
        self.lab = lab.current()
        self._is_failed = False
        self._values = 0
        self.tables: list[str] = []
        #: Sessions of applications, each in a transaction on the publisher.
        self.open: list[psycopg.Connection] = []
        self.prepared: list[str] = []

    def step(self, name: str, action: Callable[[World], object]) -> None:
        """Do a step and check what must hold after it; count it under its name."""
        if self.world is None or self._is_failed or self.lab.is_over:
            return
        self.lab.counts[f"step {name}"] += 1
        self.last, self.n_since_anew = name, self.n_since_anew + 1
        with self._told():
            action(self.world)
            self.world.check()

    def _told(self) -> _Told:
        return _Told(self)

    def failed(self, error: BaseException) -> None:
        """Have a failure say what was done."""
        self._is_failed = True
        self.lab.has_found = True
        if self.world is not None:
            error.add_note("\n".join(["script:", *self.world.script]))

    def note(self, world: World) -> None:
        """Note what time it is on the publisher."""
        rows = world.source.rows("SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')")
        self.noted = f"{rows[0][0]}+00"
        world.script.append("# the time is noted")

    def value(self) -> str:
        """Return a value that no row has yet."""
        self._values += 1
        return f"w{self._values}"

    def table(self, pick: int) -> str:
        """Return one of the tables."""
        return self.tables[pick % len(self.tables)] if self.tables else "nothing"

    def close_sessions(self) -> None:
        """End what applications have open."""
        for session in self.open:
            with suppress(Exception):
                session.close()
        self.open.clear()

    def quiet(self) -> None:
        """End what applications have in hand."""
        assert self.world is not None
        if self.open:
            self.world.script.append("source, all sessions: ROLLBACK")
        self.close_sessions()
        for gid in self.prepared:
            self.world.on_source(f"ROLLBACK PREPARED '{gid}'")
        self.prepared.clear()

    def heal(self) -> None:
        """Give back what an equal end needs."""
        self.quiet()

    def teardown(self) -> None:
        """End the example; its last check is part of it."""
        world = self.world
        if world is None:
            return
        try:
            if not self._is_failed and not self.lab.is_over:
                with self._told():
                    world.finish(self.heal)
                self.lab.counts["examples"] += 1
        finally:
            self.close_sessions()
            world.close()
            self.world = None


class _Told:
    """Adds the script to whatever goes wrong."""

    def __init__(self, machine: OneStream) -> None:
        self._machine = machine

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Note what was done."""
        if error is not None and isinstance(error, Exception):
            self._machine.failed(error)
