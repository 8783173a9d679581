"""The state machines, by topology. All share the model of `world.py` and `oracle.py`."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.operators.failover import Failover
from tests.operators.layouts import FAMILIES, Family, dumpable
from tests.operators.migration import Migration
from tests.operators.restore import Restored, Standby, Takeover
from tests.operators.rules_base import OneStream
from tests.operators.rules_daemon import Daemons, States, Tables
from tests.operators.rules_owner import Owners
from tests.operators.rules_publication import Publications
from tests.operators.rules_rows import LocalRows, Rows
from tests.operators.rules_schema import Schema
from tests.operators.switch import Switch
from tests.operators.two_way import TwoWay
from tests.operators.world import both, make_world

_FAMILIES = st.lists(st.sampled_from(FAMILIES), min_size=1, max_size=3, unique=True)
_FORMS = st.sampled_from(["named", "all", "schema"])
_PAIRS = st.tuples(st.integers(0, 3), st.integers(0, 3))


class _OneWay(OneStream):
    """Makes the example's tables, publication and slot, with some rows copied."""

    #: Of the first table; each further one has one more.
    n_copied: int = 2

    def begin_one_way(
        self, families: list[Family], form: str, pair: tuple[int, int], settings: dict[str, str | float], *,
        via_root: bool, way: str = "",
    ) -> None:  # fmt: skip
        """Make the pair and copy."""
        if self.lab.is_over:
            return
        families = [one for one in families if one.name not in self.lab.left_out] or [FAMILIES[0]]
        majors = self.lab.majors
        chosen = majors[pair[0] % len(majors)], majors[pair[1] % len(majors)]
        if way:
            # To begin again the schema is dumped.
            families = dumpable(families, chosen)
        with self._told():
            world = make_world(
                self.lab,
                chosen,
                settings={**settings, **({"ddl.apply": "true"} if way in {"queue", "automatic"} else {})},
            )
            self.world, world.ddl_way, world.quiet = world, way, self.quiet
            for family in families:
                both(world, family.statements)
                self.tables += family.listed
            what = {
                "named": f"TABLE {', '.join(self.tables)}",
                "all": "ALL TABLES",
                "schema": "TABLES IN SCHEMA public",
            }
            if form == "named" and any(family.name == "inherited" for family in families):
                what["named"] = "TABLE " + ", ".join(f"ONLY {name}" for name in self.tables)
            root = " WITH (publish_via_partition_root = true)" if via_root else ""
            world.publication_sql = f"CREATE PUBLICATION pub FOR {what[form]}{root}"
            world.on_source(world.publication_sql)
            for number, name in enumerate(self.tables, 1):
                series = f"generate_series(1, {number + self.n_copied})"
                world.on_source(f"INSERT INTO {name} (id, v) SELECT g, 'copied' FROM {series} AS g")
            done = world.init()
            assert done.returncode == 0, done.stderr


class Stream(Rows, Daemons, Tables, Publications, Owners, _OneWay):
    """One stream: rows, the daemon's life, copies, and what becomes of the publication."""

    @initialize(
        families=_FAMILIES, form=_FORMS, pair=_PAIRS, via_root=st.booleans(), two_phase=st.booleans(),
        role=st.sampled_from(["replica", "replica", "origin"]), order=st.sampled_from(["preserve", "relaxed"]),
    )  # fmt: skip
    def begin_example(
        self, *, families: list[Family], form: str, pair: tuple[int, int], via_root: bool, two_phase: bool, role: str,
        order: str,
    ) -> None:  # fmt: skip
        """Make the pair."""
        settings: dict[str, str | float] = {"apply.commit_order": order}
        if two_phase:
            settings["source.two_phase"] = "true"
        if role != "replica":
            settings["target.session_replication_role"] = role
        self.is_named, self.begins_via_root = form == "named", str(via_root).lower()
        self.begin_one_way(families, form, pair, settings, via_root=via_root)
        if self.world is not None:
            self.publication_sql = self.world.publication_sql

    def heal(self) -> None:
        """Publish everything again."""
        super().heal()
        assert self.world is not None
        if not self.is_changed:
            return
        if self.is_gone:
            self.world.on_source(self.publication_sql)
            return
        options = f"publish = 'insert, update, delete, truncate', publish_via_partition_root = {self.begins_via_root}"
        self.world.on_source(f"ALTER PUBLICATION pub SET ({options})")
        if self.is_named:
            names = ", ".join(f"ONLY {name}" for name in self.tables)
            self.world.on_source(f"ALTER PUBLICATION pub SET TABLE {names}")


class Conflicts(Rows, LocalRows, Daemons, Tables, States, _OneWay):
    """One stream, and clients that write to the target."""

    n_copied = 1

    @initialize(
        families=_FAMILIES, pair=_PAIRS, policy=st.sampled_from(["", "skip", "apply_remote"]),
        origin=st.sampled_from(["", "last_update_wins", "keep_local"]), two_phase=st.booleans(),
    )  # fmt: skip
    def begin_example(
        self, *, families: list[Family], pair: tuple[int, int], policy: str, origin: str, two_phase: bool
    ) -> None:
        """Make the pair."""
        settings: dict[str, str | float] = {"source.two_phase": "true"} if two_phase else {}
        if policy:
            kinds = ("insert_exists", "update_exists", "multiple_unique_conflicts", "update_missing", "delete_missing")
            settings |= {f"conflict.{kind}": "skip" if kind == "delete_missing" else policy for kind in kinds}
        if origin and "origin" not in self.lab.left_out:
            settings |= dict.fromkeys(("conflict.update_origin_differs", "conflict.delete_origin_differs"), origin)
        self.begin_one_way(families, "all", pair, settings, via_root=False)
        if self.world is not None:
            self.world.policies = bool(policy)


class Ddl(Rows, Schema, Daemons, Tables, _OneWay):
    """One stream, and a schema that changes."""

    @initialize(
        families=_FAMILIES, form=st.sampled_from(["all", "schema"]), pair=_PAIRS, via_root=st.booleans(),
        way=st.sampled_from(["queue", "queue", "automatic", "hand"]),
    )  # fmt: skip
    def begin_example(self, families: list[Family], form: str, pair: tuple[int, int], via_root: bool, way: str) -> None:
        """Make the pair."""
        self.way, self.attached = way, []
        self.begin_one_way(families, form, pair, {}, via_root=via_root, way=way)


MACHINES = {
    "stream": Stream, "conflicts": Conflicts, "ddl": Ddl, "two_way": TwoWay, "switch": Switch,
    "restored": Restored, "takeover": Takeover, "standby": Standby, "migration": Migration, "failover": Failover,
}  # fmt: skip
