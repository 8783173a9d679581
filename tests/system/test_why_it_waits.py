"""People can see what a batch waits for: which other batch, which table, which kind of key."""

from __future__ import annotations

import pytest

from tests.fixtures.pair import Pair, named, pair

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
_REFERENCE = "foreign key child_parent_fkey in public.child"
#: True if the workers wait for this and for nothing else; `N` is the number of the batch that is waited for.
_SHOWN = """
SELECT array_agg(replace(regexp_replace(waits_for, 'batch ' || n || '(?!\\d)', 'batch N'), 'batch ' || n + 1 || ' ',
  'batch N+1 ')) FILTER (WHERE waits_for NOT LIKE 'a lock %') = ARRAY['{}']
FROM parapply.workers, LATERAL (SELECT substring(waits_for FROM '(?:for|after) batch (\\d+)')::int AS n) AS held
"""
_HOLD = "UPDATE gate SET n = n + 1 WHERE id = 1; "


#: The first transaction, committed and held up, the one after it, and the kind of key, table and index it waits for.
_WAITS = (
    ("INSERT INTO parent VALUES (1)", "INSERT INTO child VALUES (1, 1)", _REFERENCE),
    ("INSERT INTO u VALUES (1, 'a', false, 0)", "UPDATE u SET v = 1 WHERE id = 1", "key in public.u"),
    (
        "INSERT INTO u VALUES (11, 'b', false, 0)",
        "INSERT INTO u VALUES (12, 'b', true, 0)",
        "unique u_active_mail in public.u",
    ),
    ("INSERT INTO heap VALUES (1)", "DELETE FROM heap", "table in public.heap"),
    ("INSERT INTO u VALUES (21, 'c', false, 0)", "TRUNCATE heap", "barrier"),
)


@pytest.mark.in_turn("order")
@pytest.mark.parametrize("order", ["preserve", "relaxed"])
def test_why_a_batch_waits_is_shown(pair: Pair, order: str) -> None:
    """parapply.workers names the batch, the table, the kind of key, and the index or constraint, once for each batch.

    A worker that is idle because nothing else waits says nothing, and none is listed after the end of the daemon.

    Foreign keys are waited for where they matter: readers of the kept order never see a child without its parent.
    """
    pair.create(_TABLES)
    daemon = pair.start(workers=4, settings={"apply.commit_order": order, "apply.max_batch_transactions": 1})
    for first, second, why in _WAITS:
        with named(why), pair.target.connect() as foreign:
            foreign.execute("BEGIN; SELECT FROM gate FOR UPDATE")
            pair.write(f"BEGIN; {_HOLD}{first}; COMMIT", second)
            # The daemon numbers its batches, and the one that waits follows the one that is held up.
            expected = f"batch N+1 waits for batch N: {why}"
            if why == _REFERENCE and order == "preserve":
                expected = "its turn, after batch N"
            pair.target.wait_until(_SHOWN.format(expected))
            if why == _REFERENCE:  # the first case, with the daemon's first batches
                numbered = expected.replace("N+1", "2").replace("N", "1")
                pair.target.wait_until(f"SELECT EXISTS (SELECT FROM parapply.workers WHERE waits_for = '{numbered}')")
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
    daemon.finish()
    pair.check_equal()
