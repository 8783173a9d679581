"""A refused command leaves nothing behind: no slot, state, origin, request, session or lock, at either end.

`init`, `copy` and `check` have tests of their own (`test_copy_shapes.py`, `test_check.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.fixtures.daemon import error_of
from tests.fixtures.pair import pair
from tests.fixtures.plain import FAST, foreign_transaction, wait_until_gone
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tests.fixtures.daemon import RunCommand
    from tests.fixtures.databases import Database
    from tests.fixtures.pair import Pair

__all__ = ["pair"]

_SOURCE_REFUSED = 3
_TARGET_REFUSED = 4
_NOWHERE = "FFFFFFFF/0"
_SESSIONS = (
    "SELECT coalesce(array_agg(DISTINCT application_name), '{}')::text FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name LIKE 'parapply%'"
)
_TRACES = {
    "slots": "SELECT slot_name, active FROM pg_replication_slots WHERE database = current_database() ORDER BY 1",
    "prepared": "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY 1",
    "relations": "SELECT oid::regclass::text FROM pg_class WHERE oid >= 16384 ORDER BY 1",
    "origins": "SELECT roname FROM pg_replication_origin ORDER BY 1",
    "locks": "SELECT mode FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
    " WHERE locktype = 'advisory' AND datname = current_database()",
}
#: Tables of the state that a daemon writes to by itself, also one that is refused; and while it runs.
_OF_THE_DAEMON = ("slots", "workers", "tables")
_WHILE_IT_RUNS = ("marks",)
_STATE = (
    "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = to_regnamespace('parapply')"
    f" AND relname <> ALL ('{{{','.join(_OF_THE_DAEMON)}}}') ORDER BY 1"
)


#: Two tables that are written alike.
_ONE_TEXT = (
    'CREATE SCHEMA s; CREATE TABLE s."a.b" (id int PRIMARY KEY);'
    'CREATE SCHEMA "s.a"; CREATE TABLE "s.a".b (id int PRIMARY KEY)'
)
_EITHER = 's.a.b may be each of "s"."a.b" and "s.a"."b"'


class Refusal(NamedTuple):
    """A command that is refused."""

    command: str  # with its options
    code: int
    says: str


def _traces(route: Route, but: Collection[str]) -> dict[str, list[tuple[object, ...]]]:
    found = {
        f"{end} {what}": database.rows(query)
        for end, database in (("source", route.source), ("target", route.target))
        for what, query in _TRACES.items()
    }
    for (table,) in route.target.rows(_STATE):
        if table in but:
            continue
        found[table] = route.target.rows(f"SELECT t::text FROM parapply.{table} AS t ORDER BY 1")
    return found


def _check_refused(
    route: Route, run_command: RunCommand, refusals: Sequence[Refusal], *, but: Collection[str] = ()
) -> None:
    """Run each command, which must be refused with one line, and leave both ends as they were, but for some tables."""
    before = _traces(route, but)
    sessions = {database: database.rows(_SESSIONS)[0][0] for database in (route.source, route.target)}
    for one in refusals:
        done = run_command(route, one.command)
        assert done.returncode == one.code, f"{one.command}: {done.returncode}\n{done.stdout}{done.stderr}"
        line = error_of(done.stderr.splitlines())
        assert one.says in line, f"{one.command}: {line}"
        for database, names in sessions.items():
            # A server notices a moment later that its client has gone.
            database.wait_until(f"SELECT ({_SESSIONS}) = '{names}'")
        assert _traces(route, but) == before, one.command


def test_before_there_is_anything(source_db: Database, target_db: Database, run_command: RunCommand) -> None:
    """Before anything was made only `init` makes something, and a daemon once all that it needs exists."""
    for database in (source_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    source_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    route = Route(source=source_db, target=target_db, settings=FAST)
    unmade = "run `parapply init"
    _check_refused(
        route,
        run_command,
        [
            Refusal("run", _SOURCE_REFUSED, f"slot '{route.slot}' does not exist"),
            Refusal("status", _TARGET_REFUSED, unmade),
            Refusal("top --once", _TARGET_REFUSED, unmade),
            Refusal("wait --lsn 0/1 --timeout 0", _TARGET_REFUSED, unmade),
            Refusal("skip --lsn 0/1", _TARGET_REFUSED, unmade),
            Refusal("snapshot", _TARGET_REFUSED, unmade),
            Refusal("verify", _TARGET_REFUSED, unmade),
            Refusal("refresh", _TARGET_REFUSED, unmade),
            Refusal("conflicts list", _TARGET_REFUSED, unmade),
            Refusal("conflicts show 1", _TARGET_REFUSED, unmade),
            Refusal("conflicts replay --yes 1", _TARGET_REFUSED, unmade),
            Refusal("conflicts drop --all --yes", _TARGET_REFUSED, unmade),
        ],
    )
    source_db.execute(f"SELECT pg_create_logical_replication_slot('{route.slot}', 'pgoutput')")
    _check_refused(route, run_command, [Refusal("run --publication other", _SOURCE_REFUSED, "other")])


def test_between_runs(pair: Pair, run_command: RunCommand) -> None:
    """A command refused while no daemon runs changes nothing; `drop` is refused as a whole before the slot is gone."""
    pair.create(f"CREATE TABLE t (id int PRIMARY KEY); {_ONE_TEXT}")
    pair.target.execute("INSERT INTO t VALUES (1)")
    pair.write("INSERT INTO t VALUES (1)")
    stopped = pair.start(settings={"conflict.insert_exists": "error"})
    assert stopped.exit_code(30) == 5, stopped.log_tail()
    wait_until_gone(pair.route)
    role = pair.target.target_role
    refusals = [
        Refusal(f"skip --lsn {_NOWHERE}", _TARGET_REFUSED, "no transaction ends at"),
        Refusal("skip --lsn 0/1", _TARGET_REFUSED, "has passed"),
        Refusal("snapshot", _TARGET_REFUSED, "no daemon applies"),
        Refusal("verify", _TARGET_REFUSED, "no daemon applies"),
        Refusal("verify --table public.nothing", _SOURCE_REFUSED, "not published: public.nothing"),
        Refusal("verify --table s.a.b", _SOURCE_REFUSED, _EITHER),
        Refusal("conflicts replay --yes 1", _TARGET_REFUSED, "was not left out"),
        Refusal("conflicts replay --yes 7", _TARGET_REFUSED, "no conflict 7 is kept"),
        Refusal("run --publication other", _SOURCE_REFUSED, "other"),
    ]
    _check_refused(pair.route, run_command, refusals)
    either = Refusal("refresh --table s.a.b --truncate", _SOURCE_REFUSED, _EITHER)
    _check_refused(pair.route, run_command, [either], but=_WHILE_IT_RUNS)
    # The state is another role's: its rows cannot go, so neither may the slot.
    pair.target.execute("ALTER TABLE parapply.applied OWNER TO CURRENT_USER")
    _check_refused(pair.route, run_command, [Refusal("drop --yes", _TARGET_REFUSED, "permission denied")])
    pair.target.execute(f"ALTER TABLE parapply.applied OWNER TO {role}")
    # So is what is prepared.
    ((slot_id,),) = pair.target.rows("SELECT slot_id FROM parapply.slots")
    with pair.target.connect() as other:
        other.execute(b"BEGIN")
        other.execute(f"PREPARE TRANSACTION 'parapply_{slot_id}_700_0/1'".encode())
    _check_refused(pair.route, run_command, [Refusal("drop --yes", _TARGET_REFUSED, "by another role")])
    pair.target.execute(f"ROLLBACK PREPARED 'parapply_{slot_id}_700_0/1'")
    run_command(pair.route, "drop", "--yes", code=0)
    assert pair.target.rows("SELECT to_regnamespace('parapply')") == [(None,)]


def test_beside_a_daemon(pair: Pair, run_command: RunCommand) -> None:
    """A command that a daemon refuses or is in the way of leaves no request, no snapshot and no pause; it goes on."""
    pair.create("CREATE TABLE t (id int PRIMARY KEY)")
    daemon = pair.start()
    daemon.wait_caught_up()
    refusals = [
        Refusal("drop --yes", _SOURCE_REFUSED, "is in use by process"),
        Refusal("init --copy", _TARGET_REFUSED, "was begun without a copy"),
        Refusal("skip --lsn 0/1", _TARGET_REFUSED, "has passed"),
        Refusal("snapshot --lsn 0/1", _TARGET_REFUSED, "0/1 is in the past"),
        Refusal(f"snapshot --lsn {_NOWHERE} --timeout 0.5", 1, "no snapshot"),
    ]
    _check_refused(pair.route, run_command, refusals, but=_WHILE_IT_RUNS)
    with foreign_transaction(pair.source, "SELECT pg_current_xact_id()"):
        refusal = Refusal("verify --max-pause 0.3", 1, "the publisher gave no snapshot in 0.3 s")
        _check_refused(pair.route, run_command, [refusal], but=_WHILE_IT_RUNS)
    pair.write("INSERT INTO t VALUES (1)")
    daemon.wait_caught_up()
    pair.check_equal()
