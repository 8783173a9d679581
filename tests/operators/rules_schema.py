"""DDL as operators give it: through the queue, typed where event triggers record it, or by hand on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.operators.lab import Violation
from tests.operators.rules_base import PICK, OneStream

if TYPE_CHECKING:
    from tests.operators.world import World

_LABELS = st.sampled_from("abcd")
_MOST_TRIES = 5


class Schema(OneStream):
    """Rules about the publisher's schema.

    Attributes:
        way: how a command comes to the target: queue, automatic, or hand.
    """

    way: str = "queue"
    _made: int = 0

    def ddl(self, world: World, text: str) -> bool:
        """Have a command run on both sides."""
        if self.way == "queue":
            return world.on_source(f"SELECT parapply.replicate_ddl($${text}$$)")
        if self.way == "automatic":
            return world.on_source(text)
        # As how-to/change-schemas.md has it: what is added comes to the target first; nothing is under way otherwise.
        self.quiet()
        if world.daemon is None:
            world.start()
        if not world.settle():
            return False
        first, then = (world.on_target, world.on_source) if " ADD " in text else (world.on_source, world.on_target)
        return first(text) and then(text)

    def _name(self, stem: str) -> str:
        self._made += 1
        return f"{stem}_{self._made}"

    @rule(pick=PICK)
    def add_column(self, pick: int) -> None:
        """A column comes."""
        text = f"ALTER TABLE {self.table(pick)} ADD {self._name('c')} text DEFAULT 'new'"
        self.step("ADD COLUMN", lambda world: self.ddl(world, text))

    @rule(pick=PICK, width=st.sampled_from([300, 400]))
    def change_type(self, pick: int, width: int) -> None:
        """A column's type."""
        text = f"ALTER TABLE {self.table(pick)} ALTER v TYPE varchar({width})"
        self.step("ALTER TYPE of a column", lambda world: self.ddl(world, text))

    @rule(pick=PICK)
    def rename(self, pick: int) -> None:
        """A table's name."""
        old, new = self.table(pick), self._name("renamed")

        def action(world: World) -> None:
            if self.ddl(world, f"ALTER TABLE {old} RENAME TO {new}"):
                self.tables[self.tables.index(old)] = new
                if old in world.dirty:
                    world.dirty.add(new)

        self.step("RENAME", action)

    @rule(pick=PICK, is_written=st.booleans())
    def rename_schema(self, pick: int, is_written: bool) -> None:
        """A schema's name, and its old name again; rows come under the other name."""
        name, moved = self.table(pick), self._name("moved")

        def action(world: World) -> None:
            if not self.ddl(world, f"ALTER SCHEMA public RENAME TO {moved}"):
                return
            if self.way == "hand":
                world.stop()  # as how-to/change-schemas.md has it
            if is_written:
                world.on_source(f"UPDATE {moved}.{name} SET v = '{self.value()}' WHERE id = 1")
            # A lock of another session may refuse it for a while.
            for _ in range(_MOST_TRIES):
                if self.ddl(world, f"ALTER SCHEMA {moved} RENAME TO public"):
                    if self.way == "hand":
                        world.stop()
                        world.start()
                    return
                self.quiet()
            raise Violation(f"schema {moved} cannot have its name again")

        self.step("RENAME of a schema", action)

    @rule(pick=PICK, is_logged=st.booleans())
    def unlogged(self, pick: int, is_logged: bool) -> None:
        """A table leaves WAL, or comes back."""
        name = self.table(pick)

        def action(world: World) -> None:
            is_root = f"SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass('{name}')"
            # From 18 on a partitioned table refuses it, so such a command of an older publisher stops the daemon.
            if world.source.rows(is_root) != [(True,)]:
                world.is_altered |= not is_logged
                self.ddl(world, f"ALTER TABLE {name} SET {'LOGGED' if is_logged else 'UNLOGGED'}")

        self.step("SET UNLOGGED", action)

    @rule()
    def make(self) -> None:
        """A new table."""
        name = self._name("made")

        def action(world: World) -> None:
            if self.ddl(world, f"CREATE TABLE {name} (id int PRIMARY KEY, v text)"):
                self.tables.append(name)

        self.step("CREATE TABLE", action)

    @rule(pick=PICK, is_again=st.booleans())
    def drop_table(self, pick: int, is_again: bool) -> None:
        """A table goes; it may be made again under its name."""
        name = self.table(pick)

        def action(world: World) -> None:
            if len(self.tables) == 1 or not self.ddl(world, f"DROP TABLE {name}"):
                return
            world.dirty.discard(name)
            if not (is_again and self.ddl(world, f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")):
                self.tables.remove(name)

        self.step("DROP TABLE", action)

    @rule(rows=st.integers(0, 2))
    def attach(self, rows: int) -> None:
        """A table with rows becomes a partition."""
        name = self._name("part")
        first = 100000 * (self._made + 1)

        def action(world: World) -> None:
            if "parts" not in self.tables or not self.ddl(world, f"CREATE TABLE {name} (id int PRIMARY KEY, v text)"):
                return
            if rows:
                values = f"SELECT g, '{self.value()}' FROM generate_series({first}, {first + rows - 1}) AS g"
                world.on_source(f"INSERT INTO {name} (id, v) {values}")
            bounds = f"FOR VALUES FROM ({first}) TO ({first + 1000})"
            if self.ddl(world, f"ALTER TABLE parts ATTACH PARTITION {name} {bounds}"):
                self.attached.append(name)

        self.step("ATTACH", action)

    @rule(is_kept=st.booleans())
    def detach(self, is_kept: bool) -> None:
        """A partition leaves."""

        def action(world: World) -> None:
            if "parts" in self.tables and self.ddl(world, "ALTER TABLE parts DETACH PARTITION parts_2"):
                bounds = "FOR VALUES FROM (5) TO (100000)"
                if is_kept:
                    world.on_source(f"INSERT INTO parts_2 (id, v) VALUES (6, '{self.value()}') ON CONFLICT DO NOTHING")
                self.ddl(world, f"ALTER TABLE parts ATTACH PARTITION parts_2 {bounds}")

        self.step("DETACH", action)

    #: Names of partitions that were attached.
    attached: list[str] = []  # noqa: RUF012  made again for each example

    @rule(old=_LABELS, new=_LABELS)
    def rename_label(self, old: str, new: str) -> None:
        """A label of an enum."""
        text = f"ALTER TYPE label RENAME VALUE '{old}' TO '{new}'"
        if "labelled" in self.tables:
            self.step("RENAME VALUE", lambda world: self.ddl(world, text))

    @rule(old=_LABELS, new=_LABELS)
    def swap_labels(self, old: str, new: str) -> None:
        """Two labels of an enum change places."""

        def action(world: World) -> None:
            if self.ddl(world, f"ALTER TYPE label RENAME VALUE '{old}' TO 'x'") and self.ddl(
                world, f"ALTER TYPE label RENAME VALUE '{new}' TO '{old}'"
            ):
                self.ddl(world, f"ALTER TYPE label RENAME VALUE 'x' TO '{new}'")

        if "labelled" in self.tables and old != new:
            self.step("labels swapped", action)
