"""Statement texts: what they say, how names are quoted, and which parameters they take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import sql

from parapply.errors import TargetRefused
from parapply.plan.table import ColumnFacts, Equality, Input, Replacement
from parapply.quoting import identifier
from parapply.target.catalogue.match import match
from parapply.target.sql.statements import Sql, Statements, counted, truncate
from tests.unit.plans import column, relation, sent, table

COLUMNS = [column("id"), column("v", "text"), column("n", "numeric")]


def statements(columns: list[ColumnFacts], key: list[str], *, identity: str = "d", **changes: object) -> Statements:
    """Return the statements of a table whose columns are all published, in order."""
    facts = table(columns, key, **changes)
    published = [
        sent(one.name, one.type_sql.split(".")[1], is_key=identity == "f" or one.name in key) for one in columns
    ]
    return Statements(match(relation(*published, identity=identity), facts))


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_quoting_is_that_of_the_driver(name: str) -> None:
    """Names are quoted as psycopg.sql.Identifier does, whatever is in them (trap T-60)."""
    assert identifier(name) == sql.Identifier(name).as_string(None)


def test_texts() -> None:
    """Names are quoted, values are parameters, sets cast to the base type without a length (trap T-44)."""
    made = statements(COLUMNS, ["id"])
    assert made.set_insert((0, 1)).text == (
        b'INSERT INTO "s"."t" ("id", "v") OVERRIDING SYSTEM VALUE SELECT v.c0::pg_catalog.int4, v.c1::pg_catalog.text '
        b"FROM (SELECT unnest($1::text[]) AS c0, unnest($2::text[]) AS c1) AS v WHERE (true)"
    )
    assert made.set_update((0, 1)).text == (
        b'UPDATE ONLY "s"."t" AS t SET "v" = v.c1::pg_catalog.text '
        b"FROM (SELECT unnest($1::text[]) AS c0, unnest($2::text[]) AS c1) AS v "
        b'WHERE t."id" OPERATOR(pg_catalog.=) v.c0::pg_catalog.int4 AND (true)'
    )
    assert made.set_delete().text == (
        b'DELETE FROM ONLY "s"."t" AS t USING (SELECT unnest($1::text[]) AS c0) AS v '
        b'WHERE t."id" OPERATOR(pg_catalog.=) v.c0::pg_catalog.int4'
    )
    text = b'INSERT INTO "s"."t" ("id", "v") OVERRIDING SYSTEM VALUE SELECT $1, $2 WHERE (true)'
    assert made.row_insert((0, 1)).text == text
    assert made.row_insert(()).text == b'INSERT INTO "s"."t" DEFAULT VALUES'
    assert made.row_update((0, 1)).text == (
        b'UPDATE ONLY "s"."t" AS t SET "id" = $1, "v" = $2 WHERE t."id" OPERATOR(pg_catalog.=) $3::pg_catalog.int4'
        b" AND (true)"
    )


def _replacement(name: str, expression: str, *inputs: str) -> Replacement:
    return Replacement(
        name=name, sql=expression, is_system=True, type_sql="text", base_sql="text",
        inputs=tuple([Input(name=one, type_sql="pg_catalog.text") for one in inputs]),
    )  # fmt: skip


def _replaced(*found: Replacement) -> Statements:
    columns = [*COLUMNS, column("m", "text")]
    published = [sent(one.name, one.type_sql.split(".")[1], is_key=one.name == "id") for one in columns]
    by_name = {one.name: one for one in found}
    return Statements(match(relation(*published), table(columns, ["id"]), replacements=by_name), frozenset({23, 25}))


def test_a_replaced_column_is_set_where_its_inputs_are_sent() -> None:
    """An expression whose input is unchanged TOAST keeps its value, whether the column's own value is sent or not."""
    made = _replaced(_replacement("v", "f(m)", "m"), _replacement("n", "1"))
    element = b'(SELECT f(m) FROM (SELECT v.c3::pg_catalog.text AS "m") AS r)::text'
    insert = made.set_insert((0, 1, 2, 3))
    assert (insert.positions, insert.type_oids) == ((0, 3), (23, 25))
    assert b"SELECT v.c0::pg_catalog.int4, " + element + b", (SELECT 1 FROM (SELECT ) AS r)::text, v.c3" in insert.text
    assert b'SET "v" = ' + element + b', "m" = v.c3::pg_catalog.text FROM' in made.set_update((0, 3)).text
    assert b'"v"' not in made.set_update((0, 1, 2)).text
    assert b'"n" = (SELECT 1' in made.set_update((0, 1, 2)).text
    assert made.row_insert((0, 1, 2, 3)).positions == (0, 3, 3)
    update = made.row_update((0, 1, 3))
    assert (update.positions, update.old_positions) == ((0, 3, 3), (0,))
    assert b'"v" = (SELECT f(m) FROM (SELECT $2::pg_catalog.text AS "m") AS r)::text, "m" = $3 WHERE' in update.text
    move = made.set_move((0, 3))
    assert (move.positions, move.old_positions) == ((0, 3), (0,))


def test_a_replaced_column_may_read_an_identity_column() -> None:
    """SQL cannot set an ALWAYS identity column, but what reads it changes with its other inputs."""
    columns = [column("id"), column("v"), column("n", is_identity_always=True)]
    published = [sent(one.name, is_key=one.name == "id") for one in columns]
    by_name = {"v": _replacement("v", "f(v, n)", "v", "n")}
    made = Statements(match(relation(*published), table(columns, ["id"]), replacements=by_name))
    assert made.row_update((0, 1, 2)).positions == (0, 1, 2, 2)
    assert b'"v" = (SELECT f(v, n)' in made.set_update((0, 1, 2)).text


def test_an_input_of_a_replaced_column_comes_as_the_publisher_has_it() -> None:
    """The array of the target's type would be read by that type's input before the expression sees the value."""
    made = _replaced(_replacement("v", "f(id)", "id"))
    assert made.set_insert((0, 1, 2, 3)).type_oids == (25, 25, 25)


def test_positions_say_what_the_parameters_are() -> None:
    """Set forms take one array per position; row forms take new values, then old ones."""
    made = statements(COLUMNS, ["n", "id"])
    for statement, positions, old in (
        (made.set_insert((1, 2)), (1, 2), ()),
        (made.set_update((0, 1, 2)), (0, 1, 2), ()),
        (made.set_update((1,)), (0, 1, 2), ()),
        (made.set_delete(), (2, 0), ()),
        (made.row_update((1, 2)), (1, 2), (2, 0)),
        (made.row_delete(), (), (2, 0)),
        (made.row_exists(), (), (2, 0)),
    ):
        assert statement.positions == positions
        assert statement.old_positions == old
        assert statement.n_parameters == len(positions) + len(old)
    assert [made.set_delete().is_set, made.row_delete().is_set] == [True, False]


def test_key_columns_are_set_only_where_their_text_can_change() -> None:
    """A set update leaves keys alone that are equal only if identical; 1.00 must still replace 1.0."""
    facts = [column("id"), column("n", "numeric", equality=Equality.NUMERIC), column("v", "text")]
    text = statements(facts, ["id", "n"]).set_update((0, 1, 2)).text
    assert b'SET "n" = v.c1::pg_catalog.numeric, "v" = v.c2::pg_catalog.text FROM' in text


def test_a_role_that_may_lock_no_row_asks_without_a_lock() -> None:
    """Where only inserts and deletes are published UPDATE is not granted, which every lock of a row needs.

    A lock is as strong as the change's own: a session with a new child row would meet one that is raised later.
    """
    plan = statements(COLUMNS, ["id"]).plan
    unlocked = Statements(plan, may_lock_rows=False)
    text = unlocked.row_exists().text
    assert unlocked.row_exists(frees_key=True).text == text
    assert Statements(plan).row_exists().text == text + b" FOR NO KEY UPDATE OF t"
    assert Statements(plan).row_exists(frees_key=True).text == text + b" FOR UPDATE OF t"


def test_partitioned_tables_are_written_without_only() -> None:
    """ONLY on a partitioned table would reach no row; whole rows need the partition with the row's place."""
    made = statements(COLUMNS, ["id"], is_partitioned=True)
    for statement in (made.set_update((1,)), made.set_delete(), made.row_update((1,)), made.row_delete()):
        assert b"ONLY" not in statement.text
    text = statements(COLUMNS, [], identity="f", is_partitioned=True).row_delete().text
    assert text.startswith(b'DELETE FROM "s"."t" AS t WHERE (tableoid, ctid) = (')
    assert b'(SELECT tableoid, ctid FROM "s"."t" AS t WHERE (t."id" ' in text
    assert b"ONLY" not in text


def test_same_text_same_name() -> None:
    """A prepared name stands for the text in every session, is built once, and fits into 63 bytes."""
    one, other = statements(COLUMNS, ["id"]), statements(COLUMNS, ["id"])
    assert one.set_insert((0,)) is one.set_insert((0,))
    assert one.set_insert((0,)) == other.set_insert((0,))
    forms: list[Sql] = [
        one.set_insert((0,)),
        one.set_insert((0, 1)),
        one.row_insert((0,)),
        one.set_update((1,)),
        one.row_update((1,)),
        one.set_delete(),
        one.row_delete(),
        one.row_exists(),
    ]
    assert len({form.name for form in forms}) == len(forms)
    assert all(len(form.name) == 33 for form in forms)


def test_names_that_are_not_utf8_go_back_as_they_came() -> None:
    """A publisher in SQL_ASCII may name columns in any bytes (trap T-61)."""
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert b'"caf\xe9"' in statements([column(name)], []).set_insert((0,)).text


def test_misuse_is_refused() -> None:
    """Sets without columns or key are our own errors; what the plan refuses is the operator's."""
    with pytest.raises(ValueError, match="at least one column"):
        statements(COLUMNS, ["id"]).set_insert(())
    full = statements(COLUMNS, [], identity="f")
    with pytest.raises(ValueError, match="no key"):
        full.set_update((0,))
    with pytest.raises(ValueError, match="no key"):
        full.set_delete()
    insert_only = statements(COLUMNS, [])
    with pytest.raises(TargetRefused, match="neither"):
        insert_only.row_update((0,))
    with pytest.raises(AssertionError, match="by its name"):
        counted(insert_only.few_insert(1))


def test_moved_identity_key_is_refused() -> None:
    """SQL cannot change an ALWAYS identity column; unmoved, it is only looked at (trap T-50)."""
    made = statements([column("id", is_identity_always=True), column("v", "text")], ["id"])
    assert b'SET "v" = $1 WHERE' in made.row_update((0, 1)).text
    with pytest.raises(TargetRefused, match="GENERATED ALWAYS AS IDENTITY"):
        made.row_update((0, 1), is_key_moved=True)


def test_truncate() -> None:
    """All tables of a message in one statement, never CASCADE, each once, ONLY where that is allowed (trap T-26)."""
    plain, other = table([]), table([], name='p"', is_partitioned=True)
    assert truncate([plain, other, plain], restart_identity=False).text == (
        b'TRUNCATE TABLE ONLY "s"."t", "s"."p""" CONTINUE IDENTITY RESTRICT'
    )
    assert truncate([plain], restart_identity=True).text.endswith(b" RESTART IDENTITY RESTRICT")
