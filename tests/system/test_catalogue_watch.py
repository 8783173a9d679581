"""Changes of the target's tables that the stream does not tell of are noticed by asking (T-23, F27)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pair import Pair, pair

if TYPE_CHECKING:
    from tests.fixtures.daemon import Daemon

__all__ = ["pair"]

_TABLES = "CREATE TABLE u (id int PRIMARY KEY, mail text); INSERT INTO u VALUES (1, 'a'), (2, 'b');"
_TRIGGER = """
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TRIGGER noted AFTER INSERT ON u FOR EACH ROW EXECUTE FUNCTION note();
ALTER TABLE u ENABLE ALWAYS TRIGGER noted;
"""
_SHOWN = "SELECT lane = '{}' AND reason ~ '{}' FROM parapply.tables WHERE table_name = 'u'"


@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("order", ["preserve", "relaxed"])
@pytest.mark.parametrize(
    ("change", "lane", "reason"),
    [
        ("CREATE UNIQUE INDEX u_mail ON u (mail)", "set-based", "u_mail"),
        (_TRIGGER, "serial", "trigger noted"),
        ("ALTER TABLE u ADD EXCLUDE USING btree (mail WITH =)", "set-based", "one batch at a time"),
    ],
    ids=["index", "trigger", "exclusion"],
)
def test_t23_what_is_made_on_the_target_alone_is_noticed(  # noqa: PLR0917  a row of a table
    pair: Pair, change: str, lane: str, reason: str, order: str, workers: int
) -> None:
    """Without a word in the stream and without an error, the plan follows the table, and nothing is repeated."""
    pair.create(_TABLES)
    daemon = _started(pair, 0.1, order=order, workers=workers)
    pair.target.execute(change)
    pair.target.wait_until(_SHOWN.format(lane, reason))
    pair.write("UPDATE u SET mail = 'c' WHERE id = 1", "UPDATE u SET mail = 'a' WHERE id = 2")
    daemon.wait_caught_up()
    daemon.stop()
    pair.check_equal()
    assert not daemon.events_of("batch_failed")


def test_f27_a_failed_batch_makes_it_look_at_once(pair: Pair) -> None:
    """An index that nobody knew of makes a batch fail: it is repeated, and the plan is read again without delay."""
    pair.create(_TABLES)
    with pair.target.connect() as foreign:
        daemon = _started(pair, 3600.0)
        pair.target.execute("CREATE UNIQUE INDEX u_mail ON u (mail)")
        foreign.execute("BEGIN; SELECT FROM u WHERE id = 1 FOR UPDATE")
        pair.write("UPDATE u SET mail = 'c' WHERE id = 1", "UPDATE u SET mail = 'a' WHERE id = 2")
        pair.target.wait_until(_SHOWN.format("set-based", "u_mail"))
        foreign.execute("ROLLBACK")
    daemon.wait_caught_up()
    daemon.stop()
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
