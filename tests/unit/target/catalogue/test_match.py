"""Matching relations to tables: lanes, widths, keys and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from parapply.errors import TargetRefused
from parapply.plan.table import Equality, Lane, RowTrigger
from parapply.target.catalogue.equality import equality_across, equality_of
from parapply.target.catalogue.match import match
from tests.unit.plans import TYPES, column, exclusion, foreign_key, relation, sent, table, unique

if TYPE_CHECKING:
    from parapply.model import Column, Relation
    from parapply.plan.table import ColumnFacts, ForeignKeyFacts, TableFacts, UniqueFacts

KEYED = table([column("id"), column("v", "text")], key=["id"])
SENT = relation(sent("id", is_key=True), sent("v", "text"))
KEYLESS = table([column("a"), column("b", "text")])
SENT_FULL = relation(sent("a", is_key=True), sent("b", "text", is_key=True), identity="f")


def test_plain_table_with_a_key_is_set_based_and_parallel() -> None:
    """A key of known types and nothing else on the table: sets, in parallel by key."""
    plan = match(SENT, KEYED)
    assert (plan.lane, plan.is_table_exclusive, plan.can_update) == (Lane.SET, False, True)
    assert plan.key_positions == (0,)
    assert plan.reason == 'set-based by key ("id")'


def test_columns_match_by_name() -> None:
    """Order on the two sides does not matter, nor do further target columns; the key keeps the index's order."""
    facts = table([column("x"), column("b"), column("extra"), column("a")], key=["a", "b"])
    plan = match(relation(sent("b", is_key=True), sent("x"), sent("a", is_key=True)), facts)
    assert [found.name for found in plan.columns] == ["b", "x", "a"]
    assert plan.key_positions == (2, 0)


def test_missing_and_generated_columns_are_all_named() -> None:
    """One refusal names every column that cannot be written, and the table."""
    facts = table([column("id"), column("g", is_generated=True)], key=["id"])
    with pytest.raises(TargetRefused) as caught:
        match(relation(sent("id", is_key=True), sent("g"), sent("Id"), sent("z")), facts)
    assert str(caught.value) == (
        'target table s.t is missing replicated columns: "Id", "z" and has generated columns where the publisher '
        'sends values: "g"'
    )


@pytest.mark.parametrize("field", ["triggers", "rules", "code"])
def test_code_on_the_target_is_serial(field: str) -> None:
    """Triggers, rules and functions see the order of changes; the configuration may vouch for them (trap T-29)."""
    change: dict[str, Any] = {field: ("trigger audit",)}
    facts = replace(KEYED, **change)
    plan = match(SENT, facts)
    assert (plan.lane, plan.is_table_exclusive) == (Lane.SERIAL, True)
    assert plan.reason == "serial: code on the target can see the order of changes: trigger audit"
    trusted = match(SENT, facts, parallel="always")
    assert (trusted.lane, trusted.is_table_exclusive) == (Lane.SET, False)
    assert 'parallel = "always" trusts trigger audit' in trusted.reason
    assert (plan.runs_code, trusted.runs_code, match(SENT, KEYED).runs_code) == (True, True, False)


WIDE = table([column("id"), column("a"), column("b", "text"), column("c"), column("d", "date")], key=["id"])
SENT_WIDE = relation(sent("id", is_key=True), sent("a"), sent("b", "text"), sent("d", "date"))


def _row_trigger(reads: str = "a", writes: str = "c", *, is_function_of_new: bool = True) -> RowTrigger:
    columns = (tuple(reads.split()), tuple(writes.split()))
    return RowTrigger(
        name="trigger r", version="1", reads=columns[0], writes=columns[1], is_function_of_new=is_function_of_new
    )


@pytest.mark.parametrize("writes", ["c", "b", "b c"])
def test_a_trigger_that_computes_columns_is_no_code_that_acts(writes: str) -> None:
    """It computes columns, published or not, from others that are published: sets, by key (T-29)."""
    trigger = _row_trigger(writes=writes)
    plan = match(SENT_WIDE, replace(WIDE, row_triggers=(trigger,)))
    assert (plan.lane, plan.is_table_exclusive, plan.facts.row_triggers) == (Lane.SET, False, (trigger,))
    assert plan.reason == 'set-based by key ("id"); trigger r computes columns of the row that it gets'


@pytest.mark.parametrize(
    "trigger",
    [
        _row_trigger(is_function_of_new=False),
        _row_trigger(reads="c", writes="b"),  # not published: its value may be the target's own
        _row_trigger(reads="a b", writes="b"),  # a value that is not sent is the trigger's
    ],
)
def test_a_trigger_that_may_depend_on_earlier_values_gets_each_change(trigger: RowTrigger) -> None:
    """Each change of a row in order, but no barrier; `always` trusts it to need the last only (T-29)."""
    facts = replace(WIDE, row_triggers=(trigger,))
    plan = match(SENT_WIDE, facts)
    assert (plan.lane, plan.facts.row_triggers) == (Lane.ROW, (trigger,))
    assert plan.reason == "row by row: trigger r may depend on earlier values of the row"
    trusted = match(SENT_WIDE, facts, parallel="always")
    assert (trusted.lane, trusted.facts.triggers, trusted.facts.row_triggers) == (Lane.SET, ("trigger r",), ())


@pytest.mark.parametrize(
    "facts",
    [
        replace(WIDE, row_triggers=(_row_trigger(writes="id"),)),
        replace(WIDE, row_triggers=(_row_trigger(writes="d"),)),
        replace(WIDE, row_triggers=(_row_trigger(reads="d"),)),
        replace(WIDE, row_triggers=(_row_trigger(reads="ctid"),)),
        replace(WIDE, row_triggers=(_row_trigger(), _row_trigger(writes="id"))),
        replace(WIDE, row_triggers=(_row_trigger(),), unique=(unique("u", "c"),)),
        replace(WIDE, row_triggers=(_row_trigger(),), unique=(unique("u"),)),
        replace(WIDE, row_triggers=(_row_trigger(),), unique=(unique("u", "b", is_partial=True),)),
        replace(WIDE, row_triggers=(_row_trigger(),), foreign_keys=(foreign_key("f", "c", is_enforced=False),)),
        replace(WIDE, row_triggers=(_row_trigger(),), key_columns=()),
        replace(WIDE, row_triggers=(_row_trigger(),), key_is_deferrable=True),
        table(
            [column("id"), column("a"), column("b"), column("c", is_generated=True)],
            key=["id"],
            row_triggers=(_row_trigger(),),
        ),
    ],
)
def test_a_trigger_whose_columns_count_elsewhere_acts(facts: TableFacts) -> None:
    """Where an assigned column is compared, or a value may come from the clock, the trigger is code (T-29)."""
    plan = match(relation(sent("id", is_key=True), sent("a"), sent("b", "text")), facts)
    assert plan.lane is Lane.SERIAL
    assert plan.reason.startswith("serial: code on the target can see the order of changes: trigger r")
    assert plan.facts.row_triggers == ()


def test_ordered_joins_the_transactions_of_a_serial_table() -> None:
    """It says of code that it needs order, but may see several transactions as one; without code nothing changes."""
    plan = match(SENT, replace(KEYED, triggers=("trigger audit",)), parallel="ordered")
    assert (plan.lane, plan.is_joined, plan.is_table_exclusive) == (Lane.SERIAL, True, True)
    assert plan.reason.endswith('trigger audit; parallel = "ordered" joins transactions')
    plain = match(SENT, KEYED, parallel="ordered")
    assert (plain.lane, plain.is_joined) == (Lane.SET, False)


def test_code_of_a_default_counts_only_when_it_runs() -> None:
    """A default is evaluated for columns that the publisher does not send, and only for those."""
    facts = table([column("id"), column("v", "text", default_code=("public.next()",))], key=["id"])
    assert match(SENT, facts).lane is Lane.SET
    plan = match(relation(sent("id", is_key=True)), facts)
    assert plan.lane is Lane.SERIAL
    assert "default of column v calls public.next()" in plan.reason


def test_never_is_serial() -> None:
    """The operator can take a table out of parallel apply; other words are our own error."""
    plan = match(SENT, KEYED, parallel="never")
    assert (plan.lane, plan.is_table_exclusive) == (Lane.SERIAL, True)
    assert plan.reason == 'serial: the configuration says parallel = "never"'
    with pytest.raises(ValueError, match="'sometimes'"):
        match(SENT, KEYED, parallel="sometimes")


def test_exclusion_constraint_keeps_the_set_and_widens() -> None:
    """Different values clash there: one batch at a time, unless the configuration vouches for it (trap T-22)."""
    facts = replace(KEYED, unique=(exclusion("t_excl", "v"), unique("t_v_key", "v")))
    plan = match(SENT, facts)
    assert (plan.lane, plan.is_table_exclusive) == (Lane.SET, True)
    assert plan.reason == 'set-based by key ("id"); one batch at a time: exclusion constraint t_excl'
    trusted = match(SENT, facts, parallel="always")
    assert (trusted.lane, trusted.is_table_exclusive) == (Lane.SET, False)
    assert 'parallel = "always" trusts exclusion constraint t_excl; waits by unique index t_v_key' in trusted.reason
    assert [key.name for key in trusted.unique_keys] == ["t_v_key"]


def test_unknown_key_equality_goes_row_by_row_alone() -> None:
    """Keys that cannot be compared by their text widen to the table (trap T-21)."""
    facts = table([column("k", "jsonb", equality=Equality.UNKNOWN), column("v", "text")], key=["k"])
    plan = match(relation(sent("k", "jsonb", is_key=True), sent("v", "text")), facts)
    assert (plan.lane, plan.is_table_exclusive, plan.can_update) == (Lane.ROW, True, True)
    assert plan.reason == 'row by row, one batch at a time: equal keys may differ in their text: "k" (jsonb)'


def test_full_identity_with_a_key_uses_the_key() -> None:
    """REPLICA IDENTITY FULL on the publisher does not matter where the target has a key."""
    plan = match(relation(sent("id", is_key=True), sent("v", "text", is_key=True), identity="f"), KEYED)
    assert (plan.lane, plan.is_full, plan.key_positions) == (Lane.SET, False, (0,))


def test_no_key_and_full_identity_matches_whole_rows() -> None:
    """Without a key all changes are sets; updates and deletes follow one another (trap T-24)."""
    plan = match(SENT_FULL, KEYLESS)
    assert (plan.lane, plan.is_full, plan.is_table_exclusive, plan.can_update) == (Lane.SET, True, False, True)
    assert plan.key_positions == ()
    whole = "one batch at a time: no key on the target serves, rows are found by all their columns"
    assert plan.reason == f"set-based; updates and deletes {whole}, without an index that narrows the search"
    indexed = match(SENT_FULL, replace(KEYLESS, indexed_columns=("b",)))
    assert (indexed.is_indexed, plan.is_indexed) == (True, False)
    assert indexed.reason == f"set-based; updates and deletes {whole}"
    columns = [replace(column, is_identity_always=True) for column in KEYLESS.columns]
    by_row = match(SENT_FULL, replace(indexed.facts, columns=tuple(columns)))
    assert by_row.reason == f"inserts set-based; updates and deletes row by row, {whole}"


def test_whole_rows_with_a_cast_go_row_by_row_alone() -> None:
    """Where inserts cannot be sets, nothing of such a table can run beside another batch."""
    facts = table([column("a"), column("b", "text", has_text_cast=True)])
    plan = match(SENT_FULL, facts)
    assert (plan.lane, plan.is_full, plan.is_table_exclusive) == (Lane.ROW, True, True)
    assert plan.reason.endswith(
        "; one batch at a time: no key on the target serves, rows are found by all their columns"
    )


def test_whole_rows_need_equality() -> None:
    """Inserts work where a column has no equality operator; updates say which column and type."""
    facts = table([column("a"), column("b", "json", has_equality=False)])
    plan = match(SENT_FULL, facts)
    assert not plan.can_update
    assert '"b" (json)' in plan.refusal
    assert plan.reason == "set-based: inserts only; updates and deletes are refused"


def test_no_key_and_no_full_identity_is_insert_only() -> None:
    """Inserts into a table without a key are independent sets; updates are refused in PostgreSQL's words."""
    plan = match(relation(sent("a"), sent("b", "text")), KEYLESS)
    assert (plan.lane, plan.is_full, plan.is_table_exclusive, plan.can_update) == (Lane.SET, False, False, False)
    assert "neither a replica identity index nor a primary key" in plan.refusal
    assert plan.reason == "set-based: inserts only; updates and deletes are refused"


def test_key_that_the_publisher_does_not_send() -> None:
    """A target key outside the publisher's identity arrives as NULL in key tuples: refused, not guessed (trap T-23)."""
    plan = match(relation(sent("id"), sent("v", "text", is_key=True)), KEYED)
    assert not plan.can_update
    assert plan.key_positions == ()
    assert plan.refusal == 'publisher did not send the replica identity column expected by target table s.t: "id"'
    absent = match(relation(sent("v", "text", is_key=True), identity="f"), KEYED)
    assert '"id"' in absent.refusal


def test_deferrable_key() -> None:
    """A deferrable key is used row by row, but not where whole rows are sent: it may hold twice (trap T-49)."""
    facts = replace(KEYED, key_is_deferrable=True)
    plan = match(SENT, facts)
    assert (plan.lane, plan.key_positions, plan.is_full) == (Lane.ROW, (0,), False)
    full = match(relation(sent("id", is_key=True), sent("v", "text", is_key=True), identity="f"), facts)
    assert (full.lane, full.key_positions, full.is_full) == (Lane.SET, (), True)


def test_no_columns_go_row_by_row() -> None:
    """Nothing can be unnested into rows without columns (trap T-67)."""
    plan = match(relation(identity="f"), table([column("x")]))
    assert (plan.lane, plan.is_full) == (Lane.ROW, True)
    assert match(relation(), table([])).lane is Lane.ROW


def test_cast_from_text_goes_row_by_row() -> None:
    """A set casts from text: where that is not the input function, rows go one by one but still in parallel."""
    plan = match(SENT, table([column("id"), column("v", "text", has_text_cast=True)], key=["id"]))
    assert (plan.lane, plan.is_table_exclusive) == (Lane.ROW, False)


_ENUM = column("k", type_sql="public.mood", base_type_oid=16999, type_oid=16999, is_enum=True)


@pytest.mark.parametrize(
    ("wire", "target", "equality"),
    [
        (sent("k"), column("k"), Equality.BYTES),
        (sent("k", "int2"), column("k", "int8"), Equality.BYTES),
        (sent("k", "oid"), column("k", "int8"), Equality.BYTES),
        (sent("k", "int8"), column("k", "oid"), Equality.UNKNOWN),  # -1 becomes 4294967295
        (sent("k", oid=20000), column("k"), Equality.UNKNOWN),  # a domain, or anything else
        (sent("k", oid=20000), column("k", "text"), Equality.BYTES),
        (sent("k", "bpchar"), column("k", "text"), Equality.BYTES),
        (sent("k", "text"), column("k", "varchar"), Equality.BYTES),
        (sent("k", "text"), column("k", "varchar", type_modifier=7), Equality.UNKNOWN),  # blanks beyond are cut
        (sent("k", "varchar", type_modifier=7), column("k", "varchar", type_modifier=7), Equality.BYTES),
        (sent("k", "varchar", type_modifier=6), column("k", "varchar", type_modifier=7), Equality.BYTES),
        (sent("k", "varchar", type_modifier=8), column("k", "varchar", type_modifier=7), Equality.UNKNOWN),
        (sent("k", "varchar"), column("k", "varchar", type_modifier=7), Equality.UNKNOWN),
        (sent("k", "uuid"), column("k", "varchar", type_modifier=50), Equality.BYTES),
        (sent("k", "text"), column("k", "uuid"), Equality.UNKNOWN),  # upper and lower case
        (sent("k", "timestamp"), column("k", "date"), Equality.UNKNOWN),
        (sent("k", "timestamp"), column("k", "timestamp", type_modifier=0), Equality.UNKNOWN),  # rounds
        (sent("k", "timestamp", type_modifier=0), column("k", "timestamp"), Equality.BYTES),
        (sent("k", "numeric", type_modifier=9), column("k", "numeric", equality=Equality.NUMERIC), Equality.NUMERIC),
        (
            sent("k", "numeric"),
            column("k", "numeric", equality=Equality.NUMERIC, type_modifier=9),
            Equality.UNKNOWN,
        ),
        (sent("k", "int8"), column("k", "numeric", equality=Equality.NUMERIC), Equality.NUMERIC),
        (sent("k", "int8"), column("k", "float8", equality=Equality.FLOAT), Equality.UNKNOWN),  # beyond 2^53
        (sent("k", "float8"), column("k", "float8", equality=Equality.FLOAT), Equality.FLOAT),
        (sent("k", "text"), column("k", "bpchar", equality=Equality.BPCHAR, type_modifier=9), Equality.BPCHAR),
        (sent("k", oid=20000), _ENUM, Equality.BYTES),
        (sent("k", "text"), _ENUM, Equality.BYTES),
        (sent("k", "text"), column("k", "text", equality=Equality.UNKNOWN), Equality.UNKNOWN),
    ],
)
def test_equality_across_types(wire: Column, target: ColumnFacts, equality: Equality) -> None:
    """Only where the target reads different texts as different values does the target's class hold (trap T-21)."""
    assert equality_across(wire, target) is equality


def test_nondeterministic_collation_is_unknown() -> None:
    """Text compares by bytes only under a deterministic collation; other types have none."""
    for name in ("text", "varchar", "bpchar"):
        assert equality_of(TYPES[name], is_enum=False, is_deterministic=False) is Equality.UNKNOWN
        assert equality_of(TYPES[name], is_enum=False, is_deterministic=True) is not Equality.UNKNOWN
    assert equality_of(TYPES["int4"], is_enum=False, is_deterministic=False) is Equality.BYTES


@st.composite
def _uniques(draw: st.DrawFn, names: list[str]) -> UniqueFacts:
    columns = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    equalities = tuple(draw(st.sampled_from(Equality)) for _ in columns)
    return unique(draw(st.sampled_from("ij")), *columns, equalities=equalities, is_exclusion=draw(st.booleans()))


@st.composite
def _foreign_keys(draw: st.DrawFn, names: list[str]) -> ForeignKeyFacts:
    columns = draw(st.lists(st.sampled_from([*names, "unsent"]), unique=True, min_size=1))
    equalities = tuple(draw(st.sampled_from(Equality)) for _ in columns)
    return foreign_key("f", *columns, parent_equalities=equalities, is_enforced=draw(st.booleans()))


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Relation, TableFacts]:
    names = draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4))
    equality = st.sampled_from(Equality)
    columns = [column(name, equality=draw(equality), has_equality=draw(st.booleans())) for name in names]
    key = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    flags = st.lists(st.sampled_from(["x"]), max_size=1).map(tuple)
    facts = table(
        columns,
        key,
        key_is_deferrable=bool(key) and draw(st.booleans()),
        unique=tuple(draw(st.lists(_uniques(names), max_size=2))),
        foreign_keys=tuple(draw(st.lists(_foreign_keys(names), max_size=2))),
        triggers=draw(flags),
        rules=draw(flags),
        code=draw(flags),
    )
    identity = draw(st.sampled_from("dnfi"))
    published = [sent(name, is_key=identity == "f" or draw(st.booleans())) for name in draw(st.permutations(names))]
    return relation(*published[: draw(st.integers(0, len(published)))], identity=identity), facts


@given(case=_cases(), parallel=st.sampled_from(["auto", "always", "never"]), is_relaxed=st.booleans())
def test_what_every_plan_promises(case: tuple[Relation, TableFacts], parallel: str, *, is_relaxed: bool) -> None:
    """Whatever the table: the planner and the statements may rely on these."""
    plan = match(*case, parallel=parallel, is_relaxed=is_relaxed)
    assert plan.reason
    assert plan.can_update == (not plan.refusal)
    assert not (plan.key_positions and (plan.is_full or not plan.can_update))
    assert plan.can_update == bool(plan.key_positions or (plan.is_full and not plan.refusal))
    is_excluding = parallel != "always" and any(index.is_exclusion for index in plan.facts.unique)
    if plan.lane is Lane.SERIAL or (plan.is_full and plan.lane is Lane.ROW) or is_excluding:
        assert plan.is_table_exclusive
    if plan.lane is Lane.SET:
        assert plan.columns
    if not plan.is_table_exclusive:
        assert all(plan.columns[position].equality is not Equality.UNKNOWN for position in plan.key_positions)
    if parallel != "always" and (plan.facts.triggers or plan.facts.rules or plan.facts.code):
        assert plan.lane is Lane.SERIAL
    for key in plan.unique_keys:
        assert key.positions
        assert len(key.positions) == len(key.equalities)
        assert Equality.UNKNOWN not in key.equalities
    for foreign in plan.foreign_keys:
        assert foreign.is_enforced or is_relaxed
        assert not foreign.equalities or len(foreign.equalities) == len(foreign.positions)
        assert Equality.UNKNOWN not in foreign.equalities
        if foreign.is_enforced and parallel != "always":
            assert plan.lane in {Lane.SET, Lane.SERIAL}
