"""Net changes as sets: while the source writes, or from a backlog with one or eight workers, against one oracle.

All cases go through the same streams once, with the built-in subscription beside them (`tests/fixtures/fan.py`); each
test then looks at its own tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.fan import Fan, Fans, Variant
from tests.fixtures.pair import Pair, pair
from tests.fixtures.rotation import values_of
from tests.system.key_cases import EQUAL_TEXTS, EQUAL_TEXTS_ICU, SETUP, equal_texts_case
from tests.system.set_cases import CASES

if TYPE_CHECKING:
    from tests.fixtures.servers import ServerPool

__all__ = ["pair"]

# The daemon has run before the first test looks; on a busy machine that takes its time.
pytestmark = [pytest.mark.timeout(300), pytest.mark.in_turn("variant")]

# While the source writes, with one worker nothing is merged and nothing is at once: the others have all of it.
LIVE = (Variant(workers=8, mode="live"),)
BACKLOG = tuple(Variant(workers=workers, mode="backlog") for workers in (1, 8))

every_variant = pytest.mark.parametrize("variant", [*LIVE, *BACKLOG], ids=str)


@pytest.fixture(scope="module")
def fans(server_pool: ServerPool, request: pytest.FixtureRequest) -> Fans:
    """The cases, run when first asked for."""

    def make(major: int) -> Fan:
        source, target = server_pool.get("source", major), server_pool.get("target", major)
        cases = [*CASES, equal_texts_case(EQUAL_TEXTS)]
        return Fan(source, target, cases, values_of(request, "variant", major), setup=SETUP)

    return Fans(make)


@pytest.fixture
def fan(fans: Fans, pg_major: int) -> Fan:
    """The cases on this test's major version."""
    return fans.get(pg_major)


@every_variant
def test_t18_a_chain_of_changes_to_one_row(fan: Fan, variant: Variant) -> None:
    """Insert, update, delete and insert of one key in a row of transactions end as on the source (T-18)."""
    assert fan.check(variant, "t18")["t"] == [f"({key},last)" for key in range(5)]


@every_variant
def test_t20_moved_keys(fan: Fan, variant: Variant) -> None:
    """A key that moves counts under its old and its new value; swaps are never netted into a cycle (T-20)."""
    fan.check(variant, "t20")


@every_variant
def test_t21_equal_keys_in_different_texts(fan: Fan, variant: Variant) -> None:
    """Keys are compared as the target's index does: 1.0 is 1.00, -0 is 0, '1 mon' is '30 days' (T-21)."""
    found = fan.check(variant, "t21")
    assert all(len(rows) == 1 for rows in found.values())


@every_variant
def test_t22_uniqueness_that_is_not_column_equality(fan: Fan, variant: Variant) -> None:
    """A later row may take a value that an expression, partial, NULLS NOT DISTINCT or exclusion index frees (T-22)."""
    fan.check(variant, "t22")


@every_variant
def test_t24_twins_under_replica_identity_full(fan: Fan, variant: Variant) -> None:
    """One change of one of several equal rows changes one, also where values are NULL (T-24)."""
    fan.check(variant, "t24")


@every_variant
def test_t24_sets_of_whole_rows(fan: Fan, variant: Variant) -> None:
    """Twins, NULLs, numbers in two texts and values that were not sent, with every kind of index and none (T-24)."""
    found = fan.check(variant, "t24_whole")
    assert found["scanned"] == found["narrowed"] == found["by_two"] == found["parted"]


@every_variant
def test_t25_foreign_keys_under_the_replica_role(fan: Fan, variant: Variant) -> None:
    """The target's own cascades do nothing: what the source's did arrives by itself and finds its rows (T-25)."""
    fan.check(variant, "t25")


@every_variant
def test_t26_truncate_between_other_changes(fan: Fan, variant: Variant) -> None:
    """TRUNCATE of several tables, with CASCADE and RESTART IDENTITY, keeps its place among the rows (T-26)."""
    assert fan.check(variant, "t26")["parent"] == ["(1000,after)"]


@every_variant
def test_t33_keys_of_several_columns_stay_apart(fan: Fan, variant: Variant) -> None:
    """('ab', 'c') is not ('a', 'bc'), '' is not 'NULL', a zero byte is a byte (T-33)."""
    fan.check(variant, "t33")


@every_variant
def test_t38_t49_unique_values_pass_from_row_to_row(fan: Fan, variant: Variant) -> None:
    """Shifts and swaps of unique values end as on the source, with immediate and deferred checks (T-38, T-49)."""
    fan.check(variant, "t38")


@every_variant
def test_t39_several_operations_on_one_key_in_one_transaction(fan: Fan, variant: Variant) -> None:
    """The changes of a transaction to one key are done in their order, or netted to the same (T-39)."""
    assert fan.check(variant, "t39")["t"] == ["(1,new)", "(3,c)", "(4,z)", "(6,kept)"]


@every_variant
def test_t40_the_last_of_several_updates_of_a_key_holds(fan: Fan, variant: Variant) -> None:
    """Of many updates of one key in one batch the last one's values remain (T-40)."""
    fan.check(variant, "t40")


@every_variant
def test_t41_unchanged_toast(fan: Fan, variant: Variant) -> None:
    """A value that was not sent stays what it was, also beside moved keys, in keys and in whole old rows (T-41)."""
    fan.check(variant, "t41")


@every_variant
def test_t45_large_rows_many_rows_many_columns(fan: Fan, variant: Variant) -> None:
    """Rows of megabytes, statements of thousands of rows and tables of 1600 columns arrive whole (T-45)."""
    found = fan.check(variant, "t45")
    assert len(found["many"]) == 6667


@every_variant
def test_t67_tables_without_columns(fan: Fan, variant: Variant) -> None:
    """Rows without columns are counted, and a table that is all key is updated (T-67)."""
    assert fan.check(variant, "t67")["none"] == ["()"] * 3


@every_variant
def test_t69_no_conflict_is_reported(fan: Fan, variant: Variant) -> None:
    """Batches may be repeated; what the built-in subscription applies never ends in a conflict or an error (T-69)."""
    outcome = fan.outcomes[str(variant)]
    assert not outcome.problem, outcome.problem
    assert [event for event in outcome.events if event.get("level") == "error"] == []


def test_t26_restart_identity_is_the_sources_choice(pair: Pair) -> None:
    """TRUNCATE restarts the target's sequences exactly if the source's did, and never another table's (T-26)."""
    tables = "CREATE TABLE t (id serial PRIMARY KEY); CREATE TABLE u (id int GENERATED BY DEFAULT AS IDENTITY);"
    pair.create(f"{tables} CREATE TABLE v (id serial)")
    role = pair.target.target_role
    pair.target.execute(f"ALTER TABLE t OWNER TO {role}; ALTER TABLE u OWNER TO {role}")
    pair.target.execute("SELECT setval('t_id_seq', 50), setval('u_id_seq', 60), setval('v_id_seq', 70)")
    pair.write("INSERT INTO t VALUES (7)", "TRUNCATE t, u RESTART IDENTITY", "TRUNCATE v", "INSERT INTO t VALUES (8)")
    pair.drain()
    assert pair.target.rows("SELECT id FROM t") == [(8,)]
    numbers = "SELECT nextval('t_id_seq'), nextval('u_id_seq'), nextval('v_id_seq')"
    assert pair.target.rows(numbers) == [(1, 1, 71)]


@pytest.mark.pg_majors(15)  # the embedded servers have neither ICU nor citext
def test_t21_nondeterministic_collations_and_citext(server_pool: ServerPool, pg_major: int) -> None:
    """Texts that the target's collation or type holds for equal are one key (T-21)."""
    caseless = "CREATE EXTENSION citext; CREATE COLLATION public.caseless"
    setup = f"{caseless} (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
    source, target = server_pool.get("source", pg_major), server_pool.get("target", pg_major)
    fan = Fan(source, target, [equal_texts_case(EQUAL_TEXTS_ICU)], BACKLOG[-1:], setup=setup)
    assert all(len(rows) == 1 for rows in fan.check(BACKLOG[-1], "t21").values())
