"""Owners: a table is given away on either side, and its new owner may have code on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.operators.lab import Violation
from tests.operators.rules_base import PICK, OneStream

if TYPE_CHECKING:
    from tests.operators.world import World

#: A role that has no more rights than its tables.
_STRANGER: Final = "operators_stranger"
_MAKE: Final = f"""
DO $$ BEGIN CREATE ROLE {_STRANGER}; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"""
#: Notes for whose table it ran.
_TRACE: Final = """
CREATE SCHEMA IF NOT EXISTS owners; CREATE TABLE IF NOT EXISTS owners.ran (owner text);
CREATE OR REPLACE FUNCTION owners.trace() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO owners.ran SELECT relowner::regrole::text FROM pg_class WHERE oid = TG_RELID; RETURN coalesce(NEW, OLD);
END $$"""


class Owners(OneStream):
    """Rules about who owns the tables."""

    #: A table of the target with code, once there is one.
    coded: str = ""

    @rule(pick=PICK, kind=st.sampled_from(["source", "target", "code", "back"]))
    def owner(self, pick: int, kind: str) -> None:
        """A table comes to another owner: nothing changes, unless there is code, which must not run."""

        def action(world: World) -> None:
            run = world.on_source if kind == "source" else world.on_target
            run(_MAKE.strip())
            if kind == "code" and not self.coded:
                self.coded = self.table(pick)
                run(_TRACE.strip())
                run(
                    f"CREATE TRIGGER trace BEFORE INSERT OR UPDATE OR DELETE ON {self.coded} FOR EACH ROW"
                    f" EXECUTE FUNCTION owners.trace(); ALTER TABLE {self.coded} ENABLE ALWAYS TRIGGER trace"
                )
            table = self.coded if kind == "code" else self.table(pick)
            run(f"ALTER TABLE {table} OWNER TO {'CURRENT_USER' if kind == 'back' else _STRANGER}")

        self.step("OWNER", action)
        self._look()

    def heal(self) -> None:
        """Look before the end."""
        super().heal()
        self._look()

    def _look(self) -> None:
        world = self.world
        if world is None or not self.coded or self._is_failed or self.lab.is_over:
            return
        with self._told():
            ran = world.target.rows("SELECT DISTINCT owner FROM owners.ran")
            if (_STRANGER,) in ran:
                raise Violation(f"code of {_STRANGER} ran as the role that applies")
