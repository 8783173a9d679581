"""Matching unique indexes and foreign keys to the wire: what is predicted, what is not, and what people read of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from parapply.plan.table import Equality, ForeignKey, Lane, UniqueKey
from parapply.target.catalogue.key_facts import foreign_key_facts, indexed_equality
from parapply.target.catalogue.match import match
from tests.unit.plans import TYPES, column, foreign_key, relation, sent, table, unique

if TYPE_CHECKING:
    from parapply.plan.table import ForeignKeyFacts, TablePlan, UniqueFacts

TABLE = table([column("id"), column("v", "text"), column("n"), column("own", "text")], key=["id"])
SENT = relation(sent("n"), sent("id", is_key=True), sent("v", "text"))


def _with_unique(*indexes: UniqueFacts, identity: str = "d") -> TablePlan:
    return match(replace(SENT, replica_identity=identity), replace(TABLE, unique=indexes))


def _with_foreign(*keys: ForeignKeyFacts, is_relaxed: bool = False, **changes: Any) -> TablePlan:  # noqa: ANN401
    return match(SENT, replace(TABLE, foreign_keys=keys, **changes), is_relaxed=is_relaxed)


def test_unique_index_on_published_columns_is_predicted() -> None:
    """Its values are read from wire positions in the index's order, and the table stays parallel (trap T-19)."""
    plan = _with_unique(unique("u", "v", "n", is_nulls_distinct=False, is_partial=True))
    assert (plan.lane, plan.is_table_exclusive) == (Lane.SET, False)
    assert plan.unique_keys == (
        UniqueKey(
            name="u",
            positions=(2, 0),
            equalities=(Equality.BYTES, Equality.BYTES),
            is_nulls_distinct=False,
            is_old_sent=False,
        ),
    )
    assert plan.reason == 'set-based by key ("id"); waits by unique index u'


def test_old_value_is_sent_with_the_identity() -> None:
    """The freed value is on the wire if the publisher's identity holds every column, or the whole row."""
    assert [key.is_old_sent for key in _with_unique(unique("u", "id")).unique_keys] == [True]
    assert [key.is_old_sent for key in _with_unique(unique("u", "id", "v")).unique_keys] == [False]
    assert [key.is_old_sent for key in _with_unique(unique("u", "id", "v"), identity="f").unique_keys] == [True]


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (unique("u"), "expression"),
        (unique("u", "v", "own"), "column not published"),
        (unique("u", "g"), "generated column"),
        (unique("u", "v", equalities=(Equality.UNKNOWN,)), "equal values may differ in their text"),
    ],
)
def test_what_is_not_on_the_wire_is_not_predicted(index: UniqueFacts, why: str) -> None:
    """Batches run in parallel and a failing one is repeated: the reason says for which index (traps T-22, T-23)."""
    facts = replace(TABLE, columns=(*TABLE.columns, column("g", "text", is_generated=True)), unique=(index,))
    plan = match(SENT, facts)
    assert (plan.lane, plan.is_table_exclusive, plan.unique_keys) == (Lane.SET, False, ())
    assert plan.reason == (
        f'set-based by key ("id"); unique index u is not predicted ({why}): batches that fail are repeated'
    )


def test_publishers_type_counts_for_unique_values() -> None:
    """Where the target reads two texts as one value, the index is not predicted (trap T-21)."""
    facts = table([column("id"), column("d", "date")], key=["id"], unique=(unique("u", "d"),))
    assert match(relation(sent("id", is_key=True), sent("d", "date")), facts).unique_keys
    assert not match(relation(sent("id", is_key=True), sent("d", "timestamp")), facts).unique_keys


def test_index_decides_not_the_column() -> None:
    """A column that its key compares in an unknown way may have a plain index beside it, and the reverse."""
    facts = replace(TABLE, columns=(column("id"), column("v", "text", equality=Equality.UNKNOWN), column("n")))
    plan = match(SENT, replace(facts, unique=(unique("u", "v"),)))
    assert [key.equalities for key in plan.unique_keys] == [(Equality.BYTES,)]


def test_indexes_of_leaves_that_are_alike_are_one() -> None:
    """A thousand partitions with the same index make one value to compare, and a reason that can be read."""
    plan = _with_unique(*[unique(f"u on s.p{number}", "v") for number in range(1000)], unique("w", "n"))
    assert [key.name for key in plan.unique_keys] == ["u on s.p0", "w"]
    assert plan.reason == 'set-based by key ("id"); waits by unique index u on s.p0 and 1000 more'


def test_foreign_keys_that_matter() -> None:
    """Enforced ones do; in relaxed commit order all do, since readers would see a child without its parent (T-32)."""
    enforced, loose = foreign_key("f", "n", is_cascading=True), foreign_key("g", "v", is_enforced=False)
    plan = _with_foreign(enforced, loose)
    assert plan.foreign_keys == (
        ForeignKey(
            name="f",
            positions=(0,),
            parent_oid=2,
            parent_columns=("n",),
            equalities=(Equality.BYTES,),
            is_old_sent=False,
            is_enforced=True,
            is_cascading=True,
        ),
    )
    assert (plan.lane, plan.is_table_exclusive) == (Lane.SET, False)
    assert plan.reason == 'set-based by key ("id"); waits by foreign key f'
    relaxed = _with_foreign(enforced, loose, is_relaxed=True)
    assert [(key.name, key.is_enforced) for key in relaxed.foreign_keys] == [("f", True), ("g", False)]
    assert relaxed.reason == 'set-based by key ("id"); waits by foreign key f, g'


@pytest.mark.parametrize(
    ("child", "parent", "common"),
    [
        (Equality.BYTES, Equality.BYTES, (Equality.BYTES,)),
        (Equality.BPCHAR, Equality.BPCHAR, (Equality.BPCHAR,)),
        (Equality.BYTES, Equality.NUMERIC, (Equality.NUMERIC,)),
        (Equality.NUMERIC, Equality.BYTES, (Equality.NUMERIC,)),
        (Equality.BYTES, Equality.BPCHAR, ()),
        (Equality.UNKNOWN, Equality.BYTES, ()),
        (Equality.BYTES, Equality.UNKNOWN, ()),
        (Equality.UNKNOWN, Equality.UNKNOWN, ()),
    ],
)
def test_values_of_child_and_parent(child: Equality, parent: Equality, common: tuple[Equality, ...]) -> None:
    """Values compare in a form that is right for both sides, or not at all."""
    facts = table(
        [column("id"), column("n", equality=child)],
        key=["id"],
        foreign_keys=(foreign_key("f", "n", parent_equalities=(parent,)),),
    )
    plan = match(relation(sent("id", is_key=True), sent("n")), facts)
    assert [key.equalities for key in plan.foreign_keys] == [common]
    assert ("waits for all of s.parent: values of foreign key f cannot be compared" in plan.reason) is (not common)


def test_foreign_key_that_is_not_published() -> None:
    """Its edges are known to exist, not between which rows."""
    (key,) = _with_foreign(foreign_key("f", "n", "own")).foreign_keys
    assert (key.positions, key.equalities, key.is_old_sent) == ((), (), False)


@pytest.mark.parametrize("identity", ["d", "f"])
def test_enforced_foreign_key_of_single_rows_is_serial(identity: str) -> None:
    """Rows in order cannot be put before or after another table's set (trap T-25)."""
    keyless = table([column("n"), column("v", "text", has_text_cast=identity == "d")])
    facts = replace(keyless, foreign_keys=(foreign_key("f", "n"),))
    whole = relation(sent("n", is_key=identity == "f"), sent("v", "text", is_key=identity == "f"), identity=identity)
    plan = match(whole, facts)
    assert (plan.lane, plan.is_table_exclusive) == (Lane.SERIAL, True)
    assert plan.reason.startswith("serial: foreign key f is enforced and changes are applied row by row")
    trusted = match(whole, facts, parallel="always")
    assert trusted.lane is not Lane.SERIAL
    assert 'parallel = "always" trusts foreign key f' in trusted.reason
    loose = replace(facts, foreign_keys=(foreign_key("f", "n", is_enforced=False),))
    assert match(whole, loose, is_relaxed=True).lane is not Lane.SERIAL


def test_enforced_foreign_key_of_inserts_is_set_based() -> None:
    """Without key and whole rows there are only inserts, and those are sets."""
    facts = table([column("n")], foreign_keys=(foreign_key("f", "n"),))
    assert match(relation(sent("n")), facts).lane is Lane.SET


def _indexed(type_: str, class_type: int | None, *, is_default: bool = True) -> Equality:
    return indexed_equality(
        {
            "base_type_oid": TYPES[type_],
            "is_enum": False,
            "is_deterministic": True,
            "is_index_default": is_default,
            "class_type": class_type,
        }
    )


def test_operator_class_of_another_type() -> None:
    """Only the class that is the default of the column's own type says how it compares (trap T-21)."""
    assert _indexed("varchar", TYPES["text"]) is Equality.BYTES
    assert _indexed("varchar", None) is Equality.BYTES
    assert _indexed("varchar", TYPES["bpchar"]) is Equality.UNKNOWN
    assert _indexed("text", TYPES["text"], is_default=False) is Equality.UNKNOWN
    assert _indexed("bpchar", TYPES["bpchar"]) is Equality.BPCHAR


@pytest.mark.parametrize(
    ("child", "parent", "equality"),
    [
        ("int4", "int8", Equality.BYTES),
        ("int8", "numeric", Equality.NUMERIC),
        ("varchar", "text", Equality.BYTES),
        ("date", "date", Equality.BYTES),
        ("date", "timestamp", Equality.UNKNOWN),
        ("int4", "float8", Equality.UNKNOWN),
        ("bpchar", "text", Equality.UNKNOWN),
    ],
)
def test_texts_of_child_and_parent(child: str, parent: str, equality: Equality) -> None:
    """Types whose equal values print in different ways cannot be compared, though each by itself can."""
    facts = foreign_key_facts(
        {
            "name": "f",
            "columns": ["c"],
            "parent_oid": 1,
            "parent": "s.p",
            "parent_columns": [
                {
                    "name": "p",
                    "base_type_oid": TYPES[parent],
                    "is_enum": False,
                    "is_deterministic": True,
                    "is_index_default": True,
                    "class_type": None,
                }
            ],
            "is_enforced": True,
            "is_cascading": False,
        },
        [{"name": "c", "base_type_oid": TYPES[child]}],
    )
    assert facts.parent_equalities == (equality,)
