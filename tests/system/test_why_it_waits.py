"""People can see what a batch waits for: which other batch, which table, which kind of key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import Pair, pair

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["pair"]

_TABLES = """
CREATE TABLE gate (id int PRIMARY KEY, n int);
INSERT INTO gate VALUES (1, 0);
CREATE TABLE u (id int PRIMARY KEY, mail text, active bool, v int);
CREATE UNIQUE INDEX u_active_mail ON u (mail) WHERE active;
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent);
CREATE TABLE heap (v int);
ALTER TABLE heap REPLICA IDENTITY FULL;
"""
_HOLD = "UPDATE gate SET n = n + 1 WHERE id = 1; "


@pytest.mark.parametrize("order", ["preserve", "relaxed"])
@pytest.mark.parametrize(
    ("first", "second", "kind", "table", "name"),
    [
        ("INSERT INTO u VALUES (1, 'a', false, 0)", "UPDATE u SET v = 1 WHERE id = 1", "key", "public.u", ""),
        (
            "INSERT INTO u VALUES (1, 'a', false, 0)",
            "INSERT INTO u VALUES (2, 'a', true, 0)",
            "unique",
            "public.u",
            "u_active_mail",
        ),
        (
            "INSERT INTO parent VALUES (1)",
            "INSERT INTO child VALUES (1, 1)",
            "foreign key",
            "public.child",
            "child_parent_fkey",
        ),
        ("INSERT INTO heap VALUES (1)", "DELETE FROM heap", "table", "public.heap", ""),
        ("INSERT INTO u VALUES (1, 'a', false, 0)", "TRUNCATE heap", "barrier", "", ""),
    ],
    ids=["key", "unique", "foreign key", "table", "barrier"],
)
def test_why_a_batch_waits_is_shown(  # noqa: PLR0917  a row of a table
    pair: Pair, order: str, first: str, second: str, kind: str, table: str, name: str
) -> None:
    """parapply.workers names the batch, the table, the kind of key, and the index or constraint, once for each batch.

    A worker that is idle because nothing else waits says nothing, and none is listed after the end of the daemon.

    Foreign keys are waited for where they matter: readers of the kept order never see a child without its parent.
    """
    pair.create(_TABLES)
    with pair.target.connect() as foreign:
        foreign.execute("BEGIN; SELECT FROM gate FOR UPDATE")
        daemon = pair.start(workers=4, settings={"apply.commit_order": order, "apply.max_batch_transactions": 1})
        pair.write(f"BEGIN; {_HOLD}{first}; COMMIT", second)
        if kind == "foreign key" and order == "preserve":
            expected: Sequence[str] = ["its turn, after batch 1"]
        else:
            what = f"{kind} {name}".rstrip() + (f" in {table}" if table else "")
            expected = [f"batch 2 waits for batch 1: {what}"]
        pair.target.wait_until(
            "SELECT array_agg(waits_for ORDER BY waits_for) FILTER (WHERE waits_for NOT LIKE 'a lock %') = ARRAY[{}]"
            " FROM parapply.workers".format(", ".join(f"'{text}'" for text in expected))
        )
        foreign.execute("ROLLBACK")
    daemon.wait_caught_up()
    daemon.stop()
    assert pair.target.rows("SELECT * FROM parapply.workers") == []
    pair.check_equal()
    assert not daemon.events_of("batch_retried")


def test_a_blocked_batch_keeps_no_worker_from_others(pair: Pair) -> None:
    """Relaxed, batches that share only some rows with a blocked one give their workers to those that share none.

    With two workers and a head that waits for a foreign lock, the other worker must not wait with it.
    """
    pair.create(_TABLES)
    pair.write("INSERT INTO u VALUES (1, 'a', false, 0)")
    pair.drain()
    with pair.target.connect() as foreign:
        foreign.execute("BEGIN; SELECT FROM gate FOR UPDATE")
        daemon = pair.start(workers=2, settings={"apply.commit_order": "relaxed", "apply.max_batch_transactions": 1})
        pair.write(
            f"BEGIN; {_HOLD}UPDATE u SET v = 1 WHERE id = 1; COMMIT",
            *(f"BEGIN; UPDATE u SET v = v + 1 WHERE id = 1; INSERT INTO parent VALUES ({n}); COMMIT" for n in range(5)),
            *(f"INSERT INTO heap VALUES ({n})" for n in range(50)),
        )
        pair.target.wait_until("SELECT count(*) = 50 FROM heap")
        assert pair.target.rows("SELECT count(*) FROM parent") == [(0,)]
        assert daemon.events_of("worker_freed")
        foreign.execute("ROLLBACK")
    daemon.wait_caught_up()
    daemon.stop()
    pair.check_equal()
