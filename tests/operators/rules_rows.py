"""Actions of applications: rows, large, open and prepared transactions, savepoints; and local clients of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.operators.rules_base import IDS, PICK, OneStream

if TYPE_CHECKING:
    from tests.operators.world import World

#: Few enough that clients of both sides meet.
_FEW = st.integers(1, 4)


class Rows(OneStream):
    """Rules about rows on the publisher."""

    # One rule: Hypothesis leaves out some of many rules in each example, and these belong together.
    @rule(kind=st.sampled_from(["insert", "update", "delete", "move"]), pick=PICK, row=IDS, other=IDS)
    def change(self, kind: str, pick: int, row: int, other: int) -> None:
        """A row comes, if its key is free, or changes, goes, or moves to another key."""
        table = self.table(pick)
        text = {
            "insert": f"INSERT INTO {table} (id, v) VALUES ({row}, '{self.value()}') ON CONFLICT DO NOTHING",
            "update": f"UPDATE {table} SET v = '{self.value()}' WHERE id = {row}",
            "delete": f"DELETE FROM {table} WHERE id = {row}",
            "move": f"UPDATE {table} SET id = {other} WHERE id = {row}",
        }[kind]
        self.step(kind, lambda world: world.on_source(text))

    @rule(pick=PICK, only=st.booleans())
    def truncate(self, pick: int, only: bool) -> None:
        """A table, with its children or without."""
        text = f"TRUNCATE {'ONLY ' if only else ''}{self.table(pick)} CASCADE"
        self.step("truncate", lambda world: world.on_source(text))

    @rule(pick=PICK, first=st.integers(100, 103), rows=st.sampled_from([300, 3000]), is_kept=st.booleans())
    def large(self, pick: int, first: int, rows: int, is_kept: bool) -> None:
        """A transaction that comes in progress, with a savepoint that is rolled back."""
        table, value = self.table(pick), self.value()
        text = (
            f"BEGIN; INSERT INTO {table} (id, v) SELECT g, '{value}' FROM generate_series({first}, {first + rows}) AS g"
            f" ON CONFLICT DO NOTHING; SAVEPOINT a; UPDATE {table} SET v = repeat('x', 200) WHERE id > 50;"
            f" ROLLBACK TO a; DELETE FROM {table} WHERE id > {first + 20}; {'COMMIT' if is_kept else 'ROLLBACK'}"
        )
        self.step("large", lambda world: world.on_source(text))

    @precondition(lambda self: len(self.open) < 2)
    @rule(pick=PICK, row=IDS, label=st.sampled_from(["", "a", "b", "c"]))
    def begin(self, pick: int, row: int, label: str) -> None:
        """A transaction that stays open."""
        table, value = self.table(pick), self.value()
        columns, values = ("id, v, k", f"{row}, '{value}', '{label}'") if label else ("id, v", f"{row}, '{value}'")
        text = f"INSERT INTO {table} ({columns}) VALUES ({values}) ON CONFLICT DO NOTHING"
        self.step("begin", lambda world: self._begin(world, text))

    def _begin(self, world: World, text: str) -> None:
        session = psycopg.connect(world.source.dsn, options="-c lock_timeout=200")
        world.script.append(f"source, session {len(self.open)}: BEGIN; {text}")
        try:
            session.execute(text.encode())
        except psycopg.Error:
            session.close()
        else:
            self.open.append(session)

    @precondition(lambda self: self.open)
    @rule(is_kept=st.booleans())
    def end(self, is_kept: bool) -> None:
        """The oldest open transaction ends."""
        self.step("end", lambda world: self._end(world, is_kept=is_kept))

    def _end(self, world: World, *, is_kept: bool) -> None:
        session = self.open.pop(0)
        world.script.append(f"source, session 0: {'COMMIT' if is_kept else 'ROLLBACK'}")
        try:
            if is_kept:
                session.commit()
        except psycopg.Error as error:
            world.script[-1] += f"  -- {error}"
        finally:
            session.close()

    @precondition(lambda self: len(self.prepared) < 2)
    @rule(pick=PICK, row=IDS, rows=st.sampled_from([1, 1, 2000]))
    def prepare(self, pick: int, row: int, rows: int) -> None:
        """A transaction is prepared."""
        gid, table = f"g{len(self.prepared)}_{self.value()}", self.table(pick)
        change = (
            f"UPDATE {table} SET v = '{gid}' WHERE id = {row}"
            if rows == 1
            else f"INSERT INTO {table} (id, v) SELECT g, '{gid}' FROM generate_series(5000, 5000 + {rows}) AS g"
            " ON CONFLICT DO NOTHING"
        )
        text = f"BEGIN; {change}; PREPARE TRANSACTION '{gid}'"

        def action(world: World) -> None:
            if world.on_source(text):
                self.prepared.append(gid)
                # Between a PREPARE and its outcome is a moment that an operator may want to go back to.
                self.note(world)

        self.step("prepare", action)

    @precondition(lambda self: self.prepared)
    @rule(is_kept=st.booleans())
    def decide(self, is_kept: bool) -> None:
        """The oldest prepared transaction ends."""
        gid = self.prepared.pop(0)
        self.step("decide", lambda world: world.on_source(f"{'COMMIT' if is_kept else 'ROLLBACK'} PREPARED '{gid}'"))


class LocalRows(OneStream):
    """Rules about clients that write to the target."""

    #: The publisher's last changes to a row that a client of the target has written.
    _touched: tuple[str, ...] = ()

    @rule(
        kind=st.sampled_from(["insert", "update", "delete"]),
        pick=PICK,
        row=_FEW,
        met=st.sampled_from(["", "as", "turned"]),
    )
    def local(self, kind: str, pick: int, row: int, met: str) -> None:
        """A row of the target comes, changes or goes; then the publisher may do what does not go with the last ones."""
        table = self.table(pick)
        text, touch = {
            "insert": (
                f"INSERT INTO {table} (id, v) VALUES ({row}, 'local') ON CONFLICT DO NOTHING",
                f"INSERT INTO {table} (id, v) VALUES ({row}, '{{}}') ON CONFLICT DO NOTHING",
            ),
            "update": (f"UPDATE {table} SET v = 'local' WHERE id = {row}", f"DELETE FROM {table} WHERE id = {row}"),
            "delete": (f"DELETE FROM {table} WHERE id = {row}", f"UPDATE {table} SET v = '{{}}' WHERE id = {row}"),
        }[kind]
        self.step("local write", lambda world: world.local(table, text))
        self._touched = (*self._touched[-1:], touch)
        if met:
            changes = [one.format(self.value()) for one in self._touched]
            both = "; ".join(["BEGIN", *(reversed(changes) if met == "turned" else changes), "COMMIT"])
            self.step("changes that meet", lambda world: world.on_source(both))
