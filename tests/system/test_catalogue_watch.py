"""Changes of the target's tables, of which the stream says nothing, are noticed by asking (T-23, F27)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import Pair, pair
from tests.fixtures.streams import stream_everything

if TYPE_CHECKING:
    from tests.fixtures.daemon import Daemon

__all__ = ["pair"]

_TABLES = "CREATE TABLE u (id int PRIMARY KEY, mail text); INSERT INTO u VALUES (1, 'a'), (2, 'b');"
_TRIGGER = """
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TRIGGER noted AFTER INSERT ON u FOR EACH ROW EXECUTE FUNCTION note();
ALTER TABLE u ENABLE ALWAYS TRIGGER noted;
"""
_SHOWN = "SELECT lane = '{}' AND reason ~ '{}' FROM parapply.tables WHERE table_name = '{}'"


#: Objects made on the target alone, each on its own table, and the lane and reason that follow from them.
_MADE = {
    "indexed": ("CREATE UNIQUE INDEX u_mail ON indexed (mail)", "set-based", "u_mail"),
    "triggered": (_TRIGGER.replace("ON u", "ON triggered").replace("TABLE u", "TABLE triggered"), "serial",
                  "trigger noted"),
    "excluded": ("ALTER TABLE excluded ADD EXCLUDE USING btree (mail WITH =)", "set-based", "one batch at a time"),
}  # fmt: skip


@pytest.mark.pg_majors(15, 18)
def test_t23_what_is_made_on_the_target_alone_is_noticed(pair: Pair, pg_major: int) -> None:
    """Without a word in the stream and without an error, the plan follows the table, and nothing is repeated.

    The watch on the catalogue does not depend on order or workers, so each version tries one of both.
    """
    order, workers = ("preserve", 1) if pg_major == 15 else ("relaxed", 8)
    pair.create("".join([_TABLES, *(_TABLES.replace(" u ", f" {table} ") for table in _MADE)]))
    daemon = _started(pair, 0.1, order=order, workers=workers)
    pair.write(*(f"INSERT INTO {table} VALUES (3, 'z')" for table in _MADE))
    daemon.wait_caught_up()
    for table, (change, lane, reason) in _MADE.items():
        pair.target.execute(change)
        pair.target.wait_until(_SHOWN.format(lane, reason, table))
        pair.write(f"UPDATE {table} SET mail = 'c' WHERE id = 1", f"UPDATE {table} SET mail = 'a' WHERE id = 2")
        daemon.wait_caught_up()
        assert not daemon.events_of("batch_failed"), table
    daemon.stop()
    pair.check_equal()


_AS_ROOTS = "ALL TABLES WITH (publish_via_partition_root)"
_AUDITED = """
CREATE TABLE plain (id int PRIMARY KEY, v int); CREATE TABLE ruled (id int PRIMARY KEY, v int);
CREATE TABLE tree (id int PRIMARY KEY, v int) PARTITION BY RANGE (id);
CREATE TABLE leaf PARTITION OF tree FOR VALUES FROM (0) TO (100);
CREATE TABLE streamed (id int PRIMARY KEY, v int); CREATE TABLE "re.Placed" (id int PRIMARY KEY, v int);
CREATE TABLE vetoed (id int PRIMARY KEY, v int); CREATE TABLE streamed_vetoed (id int PRIMARY KEY, v int);
CREATE TABLE other (id int PRIMARY KEY); CREATE TABLE emptied (id int PRIMARY KEY, v int);
"""
_AUDIT = """
CREATE TABLE seen (n int GENERATED ALWAYS AS IDENTITY, id int, v int);
CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
  'BEGIN INSERT INTO public.seen (id, v) VALUES (NEW.id, NEW.v); RETURN NULL; END';
"""
#: Table that is written, and code that is enabled on the target: there, or with another table that takes the name.
_ENABLED = {
    "streamed": "CREATE TRIGGER see AFTER INSERT OR UPDATE ON streamed FOR EACH ROW EXECUTE FUNCTION see();"
    " ALTER TABLE streamed ENABLE REPLICA TRIGGER see",
    "plain": "CREATE TRIGGER see AFTER INSERT OR UPDATE ON plain FOR EACH ROW EXECUTE FUNCTION see();"
    " ALTER TABLE plain ENABLE ALWAYS TRIGGER see",
    "ruled": "CREATE RULE see AS ON UPDATE TO ruled DO ALSO INSERT INTO seen (id, v) VALUES (NEW.id, NEW.v);"
    " ALTER TABLE ruled ENABLE ALWAYS RULE see",
    "tree": "CREATE TRIGGER see AFTER INSERT OR UPDATE ON leaf FOR EACH ROW EXECUTE FUNCTION see();"
    " ALTER TABLE leaf ENABLE REPLICA TRIGGER see",
    '"re.Placed"': 'CREATE TABLE fresh (LIKE "re.Placed" INCLUDING ALL); INSERT INTO fresh TABLE "re.Placed";'
    " CREATE TRIGGER see AFTER INSERT OR UPDATE ON fresh FOR EACH ROW EXECUTE FUNCTION see();"
    " ALTER TABLE fresh ENABLE ALWAYS TRIGGER see;"
    ' ALTER TABLE "re.Placed" RENAME TO stale; ALTER TABLE fresh RENAME TO "re.Placed"',
    # see() returns NULL, so the row stays as it is.
    "vetoed": "CREATE TRIGGER see BEFORE UPDATE ON vetoed FOR EACH ROW EXECUTE FUNCTION see();"
    " ALTER TABLE vetoed ENABLE ALWAYS TRIGGER see",
    "streamed_vetoed": "CREATE TRIGGER see BEFORE UPDATE ON streamed_vetoed FOR EACH ROW EXECUTE FUNCTION see();"
    " ALTER TABLE streamed_vetoed ENABLE ALWAYS TRIGGER see",
}


@pytest.mark.pg_majors(15, 18)
def test_t29_code_that_is_enabled_sees_every_change_from_then_on(pair: Pair) -> None:
    """From the commit of its DDL on a trigger or rule sees all changes in source order, and never net changes (T-29).

    The catalogue is not read in between: each batch finds the code by itself, and is repeated row by row. The plans
    know the code by then, so a trigger may also leave rows out. How the keys were predicted is not to blame.
    """
    pair.create(_AUDITED, _AUDITED + _AUDIT, published=_AS_ROOTS)
    role = pair.target.target_role
    pair.target.execute(f"GRANT ALL ON seen TO {role}")
    stream_everything(pair.source)
    settings: dict[str, str | float] = {
        "apply.catalogue_check_s": 3600.0, "source.streaming": "on", "apply.stream_start_bytes": 0,
    }  # fmt: skip
    daemon = pair.start(settings=settings)
    pair.write(*(f"INSERT INTO {table} VALUES (1, 0), (2, 0)" for table in _ENABLED))
    pair.write("INSERT INTO other VALUES (1)", "INSERT INTO emptied VALUES (1, 0)")
    daemon.wait_caught_up()
    for table, enable in _ENABLED.items():
        pair.target.execute(f"TRUNCATE seen; {enable}")
        update = f"UPDATE {table} SET v = v + 1 WHERE id = "
        writes = [f"{update}2", f"{update}1", f"{update}2"]
        if table.startswith("streamed"):
            writes = [f"INSERT INTO {table} SELECT g, 0 FROM generate_series(3, 2000) AS g", *writes]
        # Both before the plan can be known to have changed, and after.
        for _ in range(2):
            pair.write_one(*writes)
            writes = writes[-3:]
        daemon.wait_caught_up()
        assert pair.target.rows("SELECT id, v FROM seen WHERE id < 3 ORDER BY n") == [
            (2, 1), (1, 1), (2, 2), (2, 3), (1, 2), (2, 4),
        ], table  # fmt: skip
    # The rows that a TRUNCATE takes out of the batch are seen, too, also if another table comes first in it.
    pair.target.execute(
        "TRUNCATE seen; CREATE TRIGGER see AFTER INSERT ON emptied FOR EACH ROW EXECUTE FUNCTION see();"
        " ALTER TABLE emptied ENABLE ALWAYS TRIGGER see"
    )
    pair.write_one("INSERT INTO emptied VALUES (2, 0)", "TRUNCATE other, emptied")
    daemon.wait_caught_up()
    assert pair.target.rows("SELECT id, v FROM seen ORDER BY n") == [(2, 0)]
    daemon.stop()
    assert "code runs on the target for a table of it" in {one["reason"] for one in daemon.events_of("stream_spilled")}
    # A veto is met as a wrong row count.
    assert {"code", "row count"} <= {retried["reason"] for retried in daemon.events_of("batch_retried")}
    assert pair.target.rows("SELECT table_name FROM parapply.tables WHERE retries > 0") == [("vetoed",)]
    assert pair.target.rows("SELECT v FROM vetoed UNION SELECT v FROM streamed_vetoed") == [(0,)]
    pair.target.execute("DROP TABLE seen, stale, vetoed, streamed_vetoed CASCADE")
    pair.source.execute("DROP TABLE vetoed, streamed_vetoed")
    pair.check_equal()


def test_t29_a_trigger_of_the_key_sees_one_update_from_then_on(pair: Pair) -> None:
    """One change in its turn is not asked about code, so it sets what the built-in worker sets: all that came."""
    table = "CREATE TABLE plain (id int PRIMARY KEY, v int);"
    pair.create(table, table + _AUDIT)
    pair.target.execute(f"GRANT ALL ON seen TO {pair.target.target_role}")
    daemon = pair.start(settings={"apply.catalogue_check_s": 3600.0})
    pair.write("INSERT INTO plain VALUES (1, 0)")
    daemon.wait_caught_up()
    pair.target.execute(
        "CREATE TRIGGER see AFTER UPDATE OF id ON plain FOR EACH ROW EXECUTE FUNCTION see();"
        " ALTER TABLE plain ENABLE ALWAYS TRIGGER see"
    )
    pair.write("UPDATE plain SET v = 1 WHERE id = 1")
    daemon.finish()
    assert pair.target.rows("SELECT id, v FROM seen") == [(1, 1)]
    assert not daemon.events_of("batch_retried")


_LEAVES = """
CREATE TABLE tree (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE hot PARTITION OF tree FOR VALUES FROM (0) TO (100);
CREATE TABLE cold PARTITION OF tree FOR VALUES FROM (100) TO (200);
"""
_ELSEWHERE = """
CREATE TABLE other (id int); CREATE TRIGGER see AFTER INSERT ON other FOR EACH ROW EXECUTE FUNCTION see();
ALTER TABLE other ENABLE ALWAYS TRIGGER see;
"""


def test_a_partition_that_is_not_written_to_may_be_locked(pair: Pair) -> None:
    """A lock of one partition stops no changes of the others: to look for code takes no locks of tables."""
    pair.create(_LEAVES, _LEAVES + _AUDIT + _ELSEWHERE, published=_AS_ROOTS)
    daemon = pair.start(settings={"apply.catalogue_check_s": 3600.0})
    pair.write("INSERT INTO tree VALUES (1), (101)")
    daemon.wait_caught_up()
    with pair.target.connect() as session:
        session.execute("BEGIN; LOCK TABLE cold IN ACCESS EXCLUSIVE MODE")
        pair.write("INSERT INTO tree VALUES (2)")
        pair.target.wait_until("SELECT EXISTS (SELECT FROM hot WHERE id = 2)")
        session.execute("ROLLBACK")
    daemon.stop()
    assert pair.target.rows("SELECT id FROM tree ORDER BY id") == [(1,), (2,), (101,)]


def test_f27_a_failed_batch_makes_it_look_at_once(pair: Pair) -> None:
    """An index unknown to the daemon makes a batch fail: it is repeated, and the plan is read again without delay."""
    pair.create(_TABLES)
    with pair.target.connect() as foreign:
        daemon = _started(pair, 3600.0)
        pair.target.execute("CREATE UNIQUE INDEX u_mail ON u (mail)")
        foreign.execute("BEGIN; SELECT FROM u WHERE id = 1 FOR UPDATE")
        pair.write("UPDATE u SET mail = 'c' WHERE id = 1", "UPDATE u SET mail = 'a' WHERE id = 2")
        pair.target.wait_until(_SHOWN.format("set-based", "u_mail", "u"))
        foreign.execute("ROLLBACK")
    daemon.finish()
    pair.check_equal()
    assert daemon.events_of("batch_retried") or daemon.events_of("stall_broken")


def _started(pair: Pair, catalogue_check_s: float, *, order: str = "preserve", workers: int = 4) -> Daemon:
    settings: dict[str, str | float] = {
        "apply.catalogue_check_s": catalogue_check_s,
        "apply.max_batch_transactions": 1,
        "apply.commit_order": order,
    }
    daemon = pair.start(workers=workers, settings=settings)
    pair.write("INSERT INTO u VALUES (3, 'z')")
    daemon.wait_caught_up()
    return daemon
