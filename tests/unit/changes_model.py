"""Tables as dictionaries, and two ways to apply changes to them: one by one as sent, and as a batch's net effects.

The serial way is the oracle. It reads messages with the reference decoder, knows which texts are one key from the lists
below, and shares nothing with the planner. Both ways refuse what PostgreSQL would refuse or report with a wrong count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from parapply.model import FRAME_HEADER_BYTES, Relation
from parapply.plan import table_changes as net
from parapply.plan.steps import OrderedStep, TablesStep, TruncateStep
from parapply.plan.table import Equality, Lane, TableFacts, TablePlan
from parapply.plan.table_changes import InsertSegment, NetSegment
from parapply.target.catalogue.match import match
from parapply.wire.decode import decode
from parapply.wire.messages import ColumnKind, Delete, Insert, Truncate, TupleData, Update
from parapply.wire.rows import UNCHANGED, Row, text_of, values_of
from tests.unit import plans

if TYPE_CHECKING:
    from collections.abc import Iterable

    from parapply.plan.batch import Batch
    from parapply.plan.keys import Key
    from parapply.plan.table_changes import TableChanges

#: Content of a column that no insert has given a value; rows that existed first hold OLD in it.
DEFAULT = b"default"
OLD = b"old"

Texts = tuple[bytes, ...]
Values = dict[str, bytes | None]


class Refused(AssertionError):
    """The target would refuse a change, or report a count that is not the expected one."""


class Spec(NamedTuple):
    """One table on both sides."""

    name: str
    facts: TableFacts
    identity: str
    #: Texts of each key that the target holds equal; empty for a table without a key.
    keys: tuple[tuple[Texts, ...], ...]
    lane: Lane = Lane.SET
    is_exclusive: bool = False

    @property
    def oid(self) -> int:
        """Return the publisher's OID: not the target's."""
        return self.facts.oid + 16000

    def key_of(self, texts: Texts) -> int:
        """Return the number of the key that has this text."""
        return next(number for number, forms in enumerate(self.keys) if texts in forms)

    def relation(self, variant: int) -> Relation:
        """Return the relation as announced: 0 all columns; 1 in another order and without the last one."""
        if (self.name, variant) in _PLANS:
            return _PLANS[self.name, variant].relation
        keys = [
            plans.sent(column.name, column.type_sql.removeprefix("pg_catalog."), is_key=True)
            for column in self.facts.columns
            if column.name in self.facts.key_columns
        ]
        first, second = plans.sent("a", "text", is_key=self.identity == "f"), plans.sent("b", "text")
        if self.identity == "f":
            second = replace(second, is_key=True)
        columns = (first, *keys) if variant else (*keys, first, second)
        return plans.relation(*columns, identity=self.identity, oid=self.oid, name=self.name)

    def plan(self, variant: int) -> TablePlan:
        """Return the plan of an announcement, as the catalogue's facts would make it; always the same object."""
        if (self.name, variant) in _PLANS:
            return _PLANS[self.name, variant]
        plan = match(self.relation(variant), self.facts, parallel="never" if self.lane is Lane.SERIAL else "auto")
        assert plan.lane is self.lane
        assert plan.is_table_exclusive is (self.is_exclusive or self.lane is Lane.SERIAL)
        _PLANS[self.name, variant] = plan
        return plan


_PLANS: dict[tuple[str, int], TablePlan] = {}


def _spec(
    oid: int,
    types: tuple[str, ...],
    equality: Equality,
    keys: Iterable[Iterable[Texts]],
    identity: str = "d",
    **facts: object,
) -> Spec:
    names = [f"k{number}" for number in range(len(types))]
    columns = [plans.column(name, type_, equality=equality) for name, type_ in zip(names, types, strict=True)]
    columns += [plans.column("a", "text"), plans.column("b", "text"), plans.column("x", "text")]
    table = plans.table(columns, names, oid=oid, name=f"t{oid}", **facts)
    lane = Lane.ROW if facts.get("key_is_deferrable") else Lane.SERIAL if facts.get("triggers") else Lane.SET
    forms = tuple(tuple(each) for each in keys)
    return Spec(f"t{oid}", table, identity, forms, lane, is_exclusive=bool(facts.get("unique")))


PLAIN = _spec(1, ("int4",), Equality.BYTES, [[(b"1",)], [(b"2",)], [(b"3",)], [(b"10",)]])
PAIRS = [[(b"ab", b"c")], [(b"a", b"bc")], [(b"", b"abc")], [(b"abc", b"")]]
PAIR = _spec(2, ("text", "text"), Equality.BYTES, PAIRS)
NUMERIC = _spec(
    3,
    ("numeric",),
    Equality.NUMERIC,
    [[(b"1.0",), (b"1.00",), (b"1",)], [(b"10",), (b"10.0",)], [(b"0",), (b"0.00",)], [(b"100",)]],
)
BLANK = _spec(4, ("bpchar",), Equality.BPCHAR, [[(b"a",), (b"a  ",)], [(b"b",)], [(b"",), (b"  ",)]], identity="f")
UNIQUE = _spec(5, ("int4",), Equality.BYTES, [[(b"1",)], [(b"2",)], [(b"3",)]], unique=(plans.exclusion("t5_a_excl"),))
BY_ROW = _spec(6, ("int4",), Equality.BYTES, [[(b"1",)], [(b"2",)], [(b"3",)]], key_is_deferrable=True)
SERIAL = _spec(7, ("int4",), Equality.BYTES, [[(b"1",)], [(b"2",)]], triggers=("trigger audit",))
KEYLESS = _spec(8, (), Equality.BYTES, [], identity="n")
FLOAT_TRIPLE = _spec(
    9,
    ("float8", "float8", "float8"),
    Equality.FLOAT,
    [[(b"0", b"1", b"-0"), (b"-0", b"1", b"0")], [(b"1", b"0", b"0")], [(b"NaN", b"1.5", b"-1")]],
)
_ONES = (b"1",) * 9
_NINE = _spec(
    10,
    ("int4",) * 9,
    Equality.BYTES,
    [[_ONES], [(*_ONES[1:], b"2")], [(b"1", b"2", *_ONES[2:])], [(b"2", *_ONES[1:])]],
)
#: More key columns than the compiled twin finds in a frame, in another order than on the wire.
NINE = _NINE._replace(facts=replace(_NINE.facts, key_columns=("k0", *[f"k{n}" for n in range(2, 9)], "k1")))
SPECS = (PLAIN, PAIR, NUMERIC, BLANK, UNIQUE, BY_ROW, SERIAL, KEYLESS, FLOAT_TRIPLE, NINE)


class Side:
    """The rows of every table: per key, and a heap of those without one."""

    def __init__(self, specs: Iterable[Spec] = SPECS) -> None:
        """Start with the first key of every table, written with a value in every column."""
        self.specs = {spec.oid: spec for spec in specs}
        self.rows: dict[int, dict[int, Values]] = {}
        self.heaps: dict[int, list[Values]] = {}
        for spec in self.specs.values():
            self.rows[spec.oid], self.heaps[spec.oid] = {}, []
            if spec.keys:
                texts: Values = dict(zip(spec.facts.key_columns, spec.keys[0][0], strict=True))
                self.rows[spec.oid][0] = {**texts, "a": OLD, "b": OLD, "x": OLD}

    def __eq__(self, other: object) -> bool:
        """Compare all rows; keys by their text, heaps without order."""
        if not isinstance(other, Side):
            return NotImplemented
        heaps = [{oid: sorted(map(repr, heap)) for oid, heap in side.heaps.items()} for side in (self, other)]
        return self.rows == other.rows and heaps[0] == heaps[1]

    __hash__ = None  # type: ignore[assignment]

    def snapshot(self) -> Side:
        """Return the rows as they are now, in dictionaries of their own."""
        copied = Side(())
        copied.specs = self.specs
        copied.rows = {oid: {key: dict(row) for key, row in rows.items()} for oid, rows in self.rows.items()}
        copied.heaps = {oid: list(heap) for oid, heap in self.heaps.items()}
        return copied

    def _key(self, oid: int, values: Values) -> int:
        spec = self.specs[oid]
        return spec.key_of(tuple([values[name] or b"" for name in spec.facts.key_columns]))

    def insert(self, oid: int, values: Values) -> None:
        """Insert; a key that is there is refused."""
        row: Values = {"a": DEFAULT, "b": DEFAULT, "x": DEFAULT, **values}
        if not self.specs[oid].keys:
            self.heaps[oid].append(row)
            return
        key = self._key(oid, row)
        if key in self.rows[oid]:
            raise Refused("insert_exists")
        self.rows[oid][key] = row

    def update(self, oid: int, found: Values, values: Values) -> None:
        """Update what is found by the key in `found`; its new key must be free."""
        row = self.rows[oid].pop(self._key(oid, found), None)
        if row is None:
            raise Refused("update_missing")
        row = row | values
        key = self._key(oid, row)
        if key in self.rows[oid]:
            raise Refused("update_exists")
        self.rows[oid][key] = row

    def delete(self, oid: int, found: Values) -> None:
        """Delete what is found by the key in `found`."""
        if self.rows[oid].pop(self._key(oid, found), None) is None:
            raise Refused("delete_missing")

    def truncate(self, oid: int) -> None:
        """Empty a table."""
        self.rows[oid].clear()
        self.heaps[oid].clear()

    def apply(self, frame: bytes, relation: Relation) -> None:
        """Apply one change as sent."""
        message = decode(frame[FRAME_HEADER_BYTES:])
        if isinstance(message, Insert):
            self.insert(relation.oid, _values(message.new, relation))
        elif isinstance(message, Update):
            before = message.key or message.old
            new = _values(message.new, relation)
            found = new if before is None else _values(before, relation)
            keys = self.specs[relation.oid].facts.key_columns
            self.update(relation.oid, found, {name: found[name] for name in keys} | new)
        elif isinstance(message, Delete):
            self.delete(relation.oid, _values(message.key or message.old or (), relation))
        else:
            assert isinstance(message, Truncate)
            for oid in message.relation_oids:
                self.truncate(oid)

    def apply_batch(self, batch: Batch, *, with_late_keys: bool = True) -> None:
        """Apply a batch's steps as the target does; tables of one step in another order than they came.

        Args:
            batch: closed.
            with_late_keys: all changes; else late keys' changes are left to `apply_late_keys`.
        """
        assert not batch.is_suspect
        for step in batch.steps:
            if isinstance(step, TablesStep):
                for changes in reversed(step.tables.values()):
                    self._apply_table(changes, set() if with_late_keys else changes.late_keys)
            elif isinstance(step, OrderedStep):
                for change in step.changes:
                    if isinstance(change, TruncateStep):
                        self._apply_truncate(change)
                    else:
                        plan, frame = change
                        self.apply(frame, plan.relation)
            else:
                self._apply_truncate(step)

    def apply_late_keys(self, batch: Batch) -> None:
        """Apply what `apply_batch` left out."""
        for changes in batch.table_changes:
            for segment in changes.segments:
                if isinstance(segment, NetSegment):
                    self._apply_net(segment, set(segment.net) - changes.late_keys)

    def _apply_truncate(self, step: TruncateStep) -> None:
        for plan in step.plans:
            self.truncate(plan.relation.oid)

    def _apply_table(self, changes: TableChanges, left_out: set[Key]) -> None:
        for segment in changes.segments:
            relation = segment.plan.relation
            if isinstance(segment, NetSegment):
                self._apply_net(segment, left_out)
            elif isinstance(segment, InsertSegment):
                for row in segment.rows:
                    self.insert(relation.oid, _present(values_of(row), relation))
            else:
                for frame in segment.frames:
                    self.apply(frame, relation)

    def _apply_net(self, segment: NetSegment, left_out: set[Key]) -> None:
        relation = segment.plan.relation
        oid = relation.oid
        entries = [entry for key, entry in segment.net.items() if key not in left_out]
        effects = [(effect, _present(values_of(row), relation)) for effect, row in entries]
        for effect, values in effects:
            if effect in (net.NET_DELETE, net.NET_REPLACE):
                self.delete(oid, values)
        for effect, values in effects:
            if effect == net.NET_ABSENT and self._key(oid, values) in self.rows[oid]:
                raise Refused("insert_exists")
            if effect == net.NET_UPDATE:
                assert segment.has_unchanged or len(values) == len(relation.columns)
                self.update(oid, values, values)
        for effect, values in effects:
            if effect in (net.NET_INSERT, net.NET_REPLACE):
                assert len(values) == len(relation.columns), "an inserted row has every value"
                self.insert(oid, values)


def _values(row: TupleData, relation: Relation) -> Values:
    pairs = zip(relation.columns, row, strict=True)
    return {column.name: cell.value for column, cell in pairs if cell.kind is not ColumnKind.UNCHANGED}


def _present(row: Row, relation: Relation) -> Values:
    pairs = zip(relation.columns, row, strict=True)
    return {column.name: text_of(value) for column, value in pairs if value is not UNCHANGED}
