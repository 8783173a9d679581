"""`parapply cutover`: there and back under a writer that counts, killed at each step, undone, and refused."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from parapply import failpoints
from parapply.target.session import lease
from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.ends import FENCER, REFUSED, Ends
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import FAST
from tests.fixtures.roles import SOURCE_ROLE, TARGET_ROLE
from tests.fixtures.route import Route
from tests.fixtures.two_phase import TWO_PHASE, n_prepared

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase, OwnServers

#: For tests of something else.
_UNCOMPARED = ("--verify", "none")
_END_VERIFYING: Final = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE starts_with(application_name, 'parapply verify ')"
)


class Writer:
    """A client that writes one row after the other to whichever side takes writes, and counts what is acknowledged.

    It is a session of the role that owns the tables, and connects again when it was ended or may only read.
    """

    def __init__(self, database: Database) -> None:
        """Write to a database from now on."""
        self.database = database
        self.acknowledged: list[int] = []
        self._unknown = 0
        self._ends = threading.Event()
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._ends.is_set():
            try:
                with self.database.connect(user=TARGET_ROLE, application_name="writer") as session:
                    while not self._ends.is_set():
                        number += 1
                        with session.transaction():
                            session.execute("INSERT INTO evt VALUES (%s)", [number])
                            session.execute("INSERT INTO item (v) VALUES (%s)", [number])
                        with self._moved:
                            self.acknowledged.append(number)
                            self._moved.notify_all()
                        # As a client that also has other things to do.
                        self._ends.wait(0.1)
            except psycopg.Error:
                self._ends.wait(0.1)

    def wait_for(self, more: int) -> None:
        """Return when this number of further rows is acknowledged."""
        with self._moved:
            wanted = len(self.acknowledged) + more
            assert self._moved.wait_for(lambda: len(self.acknowledged) >= wanted, 30), "no write came through"

    def end(self) -> None:
        """Write no more."""
        self._ends.set()
        self._thread.join()


def test_there_and_back_under_a_writer(ends: Ends) -> None:
    """No acknowledged write is lost or doubled, each way; the old side follows, and takes the writes again.

    A publication FOR ALL TABLES of the old side also has the state that the way back writes there: no client's write.
    """
    ends.source.execute("DROP PUBLICATION pub; CREATE PUBLICATION pub FOR ALL TABLES")
    daemon = ends.start(ends.ahead)
    writer = Writer(ends.source)
    writer.wait_for(6)
    looked = ends.run("--dry-run")
    assert (looked.returncode, looked.stderr) == (0, ""), looked
    assert "9/9 ending" in looked.stdout
    ends.check_nothing_left()

    there = ends.run("--verify", "whole")
    assert there.returncode == 0, there
    assert "no client could write for " in there.stdout
    assert daemon.exit_code() == 4
    assert f"slot '{ends.ahead.slot}' was cut over: " in daemon.log_tail()
    ends.refuse_others()
    with ends.source.connect(user=TARGET_ROLE) as session, pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        session.execute("INSERT INTO evt VALUES (0)")
    writer.database = ends.target
    writer.wait_for(6)
    followed = ends.start(ends.back)
    writer.wait_for(6)
    assert ends.run().stdout.startswith(f"slot '{ends.ahead.slot}' was cut over already")

    back = ends.run("--back")
    assert back.returncode == 0, back
    # Behind the fence the daemon is not asked for a snapshot.
    assert re.search(r"are equal at [0-9A-F/]+\n", back.stdout), back.stdout
    assert followed.exit_code() == 4
    writer.database = ends.source
    writer.wait_for(6)
    daemon = ends.start(ends.ahead)
    writer.wait_for(6)
    writer.end()
    daemon.wait_caught_up()
    ends.check_equal(writer.acknowledged)
    assert len(ends.target.rows("SELECT FROM pg_replication_slots WHERE database = current_database()")) == 0
    daemon.stop()


@pytest.mark.pg_majors(15)
def test_killed_at_each_step_it_goes_on_or_is_undone(ends: Ends) -> None:
    """After SIGKILL at any step the same command goes on, or `--undo` takes it back as long as no writer was let in.

    Nothing is lost and nothing comes twice, also where the server cannot filter by origin. Both sides are compared
    where a kill is at the comparison or next to it; each other kill is paired with `--verify none`.
    """
    daemon = ends.start(ends.ahead)
    writer = Writer(ends.source)
    writer.wait_for(4)
    before, after = failpoints.CUTOVER_NAMES[:7], failpoints.CUTOVER_NAMES[7:]
    done = []
    for point in before:
        done.append(ends.run(*_compared_at(point), killed_at=point))
        if point in {"cutover_preparing", "cutover_fencing", "cutover_turning"}:
            ends.refuse_way_back(point.removeprefix("cutover_"))
    assert [one.returncode for one in done] == [-9] * len(done), done
    assert "a cut-over is under way, at step 6 of 9, stopping" in done[-1].stdout
    assert daemon.exit_code() == 4
    dropped = ends.run_other("drop", "--yes")
    assert dropped.returncode == REFUSED["target"]
    assert "is under way, at the step turning: only its note knows of the fence" in dropped.stderr
    undone = ends.run("--undo")
    assert undone.returncode == 0, undone
    writer.wait_for(4)
    ends.check_nothing_left()
    assert "nothing to undo" in ends.run("--undo").stdout

    ends.start(ends.ahead)
    done = []
    for point in after:
        done.append(ends.run("--verify", "none", killed_at=point))
        if point == "cutover_opening":
            ends.refuse_copies_back("opening")
    assert [one.returncode for one in done] == [-9] * len(done), done
    assert "a cut-over is under way, at step 9 of 9, ending" in done[-1].stdout
    writer.database = ends.target
    writer.wait_for(4)
    again = ends.run()
    assert (again.returncode, "nothing to do" in again.stdout) == (0, True)
    late = ends.run("--undo")
    assert late.returncode == REFUSED["target"]
    assert "cannot be undone" in late.stderr
    follower = ends.start(ends.back)
    writer.end()
    follower.wait_caught_up()
    ends.check_equal(writer.acknowledged)
    follower.stop()


def _compared_at(point: str) -> tuple[str, ...]:
    return () if point in {"cutover_comparing", "cutover_sequences"} else ("--verify", "none")


def test_what_fails_is_taken_back_by_itself(ends: Ends, tmp_path: Path) -> None:
    """A table that differs, or a target that does not keep up, ends the cut-over, and clients write as before.

    A command as the fence is called to let them in again. A cut-over resumed after a kill looks at all of it again.
    """
    daemon = ends.start(ends.ahead)
    ends.source.execute("INSERT INTO item VALUES (1, 1), (2, 2)")
    daemon.wait_caught_up()
    ends.target.execute("UPDATE item SET v = 7 WHERE id = 1")
    differs = ends.run()
    assert differs.returncode == 1
    assert "public.item: DIFFERENT" in differs.stdout
    assert "everything was taken back" in differs.stdout
    # No client had to wait for that.
    assert "fencing" not in differs.stdout
    ends.check_nothing_left()
    ends.target.execute("UPDATE item SET v = 1 WHERE id = 1")
    _check_beside_a_copy(ends)
    ends.run("--verify", "none", killed_at="cutover_draining")
    ends.target.execute("UPDATE item SET v = 7 WHERE id = 1")
    differs = ends.run()
    assert differs.returncode == 1
    assert "public.item: DIFFERENT" in differs.stdout
    ends.check_nothing_left()
    ends.target.execute("UPDATE item SET v = 1 WHERE id = 1")
    ends.run("--verify", "none", killed_at="cutover_fencing")
    ends.target.execute("ALTER PUBLICATION pub_back SET (publish = 'insert')")
    later = ends.run()
    assert "the publication of the way back leaves out delete, truncate, update" in later.stderr
    assert "everything was taken back" in later.stdout
    ends.check_nothing_left()
    said = tmp_path / "said"
    command = f'echo "$PARAPPLY_FENCE" >> {said}; test "$PARAPPLY_FENCE" = off'
    failed = ends.run("--verify", "none", "--fence-command", command)
    assert failed.returncode == 1
    assert "--fence-command ended with 1" in failed.stderr
    assert said.read_text() == "on\noff\n"
    ends.check_nothing_left()
    _check_after_the_fence(ends)
    _check_failed_take_back(ends)
    ends.source.execute(f"REVOKE SELECT ON item FROM {SOURCE_ROLE}")
    refused = ends.run()
    # A refusal that would come again after the fence.
    assert (refused.returncode, "fencing" in refused.stdout) == (REFUSED["source"], False), refused
    assert "permission denied for table item" in refused.stderr
    assert "everything was taken back" in refused.stdout
    ends.source.execute(f"GRANT SELECT ON item TO {SOURCE_ROLE}")
    ends.check_nothing_left()
    daemon.pause()
    slow = ends.run("--timeout", "1")
    assert slow.returncode == 1
    assert "warning: not compared before the fence" in slow.stdout
    assert "not there after" in slow.stderr
    ends.check_nothing_left()


def _check_beside_a_copy(ends: Ends) -> None:
    """A command that copies tables, begun after the first look, is noticed before clients wait."""
    with ends.target.connect() as copying:
        copying.execute(f"SELECT pg_advisory_lock({lease.COPY_LOCK_CLASS}, slot_id * 2) FROM parapply.slots")
        beside = ends.run("--verify", "none")
    assert beside.returncode == REFUSED["target"]
    assert "are being copied" in beside.stderr
    assert "fencing" not in beside.stdout
    ends.check_nothing_left()
    # A table that waits is found by the name that it has now also.
    assert ends.run_other("pause", "public.evt").returncode == 0
    rename = "ALTER TABLE {} RENAME TO {}"
    for database in (ends.source, ends.target):
        database.execute(rename.format("evt", "renamed"))
    assert "the target does not have all of public.evt" in ends.run("--dry-run").stderr
    for database in (ends.source, ends.target):
        database.execute(rename.format("renamed", "evt"))
    assert ends.run_other("resume", "public.evt").returncode == 0


def _check_after_the_fence(ends: Ends) -> None:
    """A row that differs since the first comparison is found, also where the sessions that compare were ended."""
    for damage in ("", _END_VERIFYING):
        with ends.held("cutover_fencing") as done:
            ends.source.execute(damage)
            ends.source.forget()
            ends.target.execute(f"{damage}; UPDATE item SET v = 7 WHERE id = 1")
        assert done[0].returncode == 1, done[0]
        assert ("compared by new sessions" if damage else "compared again, at one LSN") in done[0].stdout
        assert "public.item: DIFFERENT" in done[0].stdout
        ends.check_nothing_left()
        ends.target.execute("UPDATE item SET v = 1 WHERE id = 1")


def _check_failed_take_back(ends: Ends) -> None:
    """Where taking back fails, it is seen whether clients can write, and that `--undo` goes on."""
    ends.run("--verify", "none", "--fence-command", "true", killed_at="cutover_draining")
    # The remaining removal fails after the fence was lifted.
    ends.target.execute("ALTER PUBLICATION pub_back OWNER TO CURRENT_USER")
    for flags, code, is_fenced in (((), 2, True), (("--fence-command", "true"), 4, False)):
        undone = ends.run("--undo", *flags)
        assert undone.returncode == code, undone
        seen = ends.cutover()
        assert (seen["step"], seen["is_fenced"], seen["gap_s"] is not None) == ("undoing", is_fenced, is_fenced)
    refused = ends.run("--fence-command", "true")
    assert "with --undo" in refused.stderr
    ends.target.execute(f"ALTER PUBLICATION pub_back OWNER TO {TARGET_ROLE}")
    assert ends.run("--undo").returncode == 0
    ends.check_nothing_left()
    ends.run("--verify", "none", "--fence-command", "true", killed_at="cutover_draining")
    unlifted = ends.run("--fence-command", 'test "$PARAPPLY_FENCE" = wrong')
    assert "the same command with --undo takes it back; until then no client can write" in unlifted.stderr
    assert ends.run("--undo", "--fence-command", "true").returncode == 0
    ends.check_nothing_left()


def test_a_write_after_the_fence_is_found(ends: Ends) -> None:
    """A write of a kept session after the daemon was stopped is shown; the same command also brings it over.

    Where the cut-over is, others see in the daemon's metrics as long as there is one, and in `parapply status`.
    """
    daemon = ends.start(ends.ahead, LISTEN)
    endpoint = Endpoint(daemon)
    with ends.source.connect(user=TARGET_ROLE) as kept:
        with ends.held("cutover_stopping", "--keep-role", TARGET_ROLE) as done:
            at = ("stopping", ends.back.slot)
            endpoint.wait_until(lambda: endpoint.samples().get("parapply_cutover_step", {}).get(at[::-1]))
            assert endpoint.samples()["parapply_cutover_fenced"] == {(): 1.0}
            seen = ends.cutover()
            assert [seen[key] for key in ("step", "is_fenced", "is_worked_on", "opened_at")] == [
                *at[:1],
                True,
                True,
                None,
            ]
            daemon.kill()
            kept.execute("INSERT INTO evt VALUES (7)")
        assert done[0].returncode == REFUSED["source"], done[0]
        assert "1 transactions were committed on the source after the fence" in done[0].stderr
        ends.start(ends.ahead)
        again = ends.run("--keep-role", TARGET_ROLE)
    assert again.returncode == 0, again
    assert ends.target.rows("SELECT n FROM evt") == [(7,)]
    seen = ends.cutover()
    assert (seen["step"], seen["is_worked_on"], seen["gap_s"] > 0) == ("done", False, True)


def test_what_comes_between_the_look_and_the_fence(ends: Ends) -> None:
    """A table that came is refused behind the fence, and everything is taken back: the way back would leave it out.

    No session writes to the source after the cut-over: neither one that has taken a name like the daemon's, nor one
    that had read the database's settings before the fence and was seen only after that.
    """
    ends.start(ends.ahead)
    table = f"CREATE TABLE fresh (id int PRIMARY KEY); ALTER TABLE fresh OWNER TO {TARGET_ROLE}"
    with ends.held("cutover_fencing") as refused:
        ends.target.execute(table)
        ends.source.execute(f"{table}; ALTER PUBLICATION pub ADD TABLE fresh")
        ends.source.forget()
    assert refused[0].returncode == REFUSED["source"], refused[0]
    assert "published since the cut-over looked at its tables: public.fresh" in refused[0].stderr
    ends.check_nothing_left()

    starter = _Starter(ends.source)
    with ends.source.connect(user=TARGET_ROLE, application_name="parapply billing") as billing:
        with ends.held("cutover_fencing", "--verify", "none") as done:
            starter.start()
        assert done[0].returncode == 0, done[0]
        with pytest.raises(psycopg.OperationalError):
            billing.execute("INSERT INTO evt VALUES (1)")
    starter.is_over.set()
    starter.join()
    assert isinstance(starter.error, psycopg.Error), "a session that was starting wrote behind the fence"
    assert ends.source.rows("SELECT n FROM evt") == []


class _Starter(threading.Thread):
    """A session that takes a second between the settings of its database and its first statement, which writes."""

    error: psycopg.Error | None = None

    def __init__(self, database: Database) -> None:
        super().__init__(daemon=True)
        self._database = database
        self.is_over = threading.Event()

    def start(self) -> None:
        """Return once it has begun."""
        super().start()
        self._database.wait_until(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE classid = 'pg_database'::regclass AND mode = 'RowExclusiveLock'"
            " AND objid = (SELECT oid FROM pg_database WHERE datname = current_database()))"
        )
        self._database.forget()

    def run(self) -> None:
        try:
            with self._database.connect(user=TARGET_ROLE, options="-c post_auth_delay=1") as session:
                self.is_over.wait(60)
                session.execute("INSERT INTO evt VALUES (2)")
        except psycopg.Error as error:
            self.error = error


def test_what_would_fail_is_refused_before_anything_is_made(
    ends: Ends, new_database: NewDatabase, run_command: RunCommand, init_route: Callable[[Route], None]
) -> None:
    """Each refusal is a line that names what is missing, and the grant; nothing was made."""
    init_route(ends.ahead)
    # The role of the scripts owns no database, and may not end the sessions of others, a superuser's least of all.
    plain = Route(source=ends.source, target=ends.target, slot=ends.ahead.slot, settings=FAST)
    # As after `init --copy`, with a table that was published later and has had no change since.
    ends.source.execute("INSERT INTO item VALUES (1, 1)")
    ends.target.execute(
        "UPDATE parapply.slots SET copies_only = true, reason = 'of a fleet';"
        "ALTER TABLE item DROP CONSTRAINT item_pkey, ADD PRIMARY KEY (id) DEFERRABLE"
    )
    # As after a CREATE INDEX CONCURRENTLY of the publisher that the daemon has not run yet.
    ends.target.execute(
        "INSERT INTO parapply.ddl (slot_id, commit_lsn, number, tag, command, source_role, outcome)"
        " SELECT slot_id, '0/1', 1, 'CREATE INDEX', 'x', 'x', 'pending' FROM parapply.slots"
    )
    with ends.source.connect() as superuser, ends.source.connect(user=TARGET_ROLE) as session:
        session.execute("BEGIN; INSERT INTO evt VALUES (1); PREPARE TRANSACTION 'left'")
        pid = superuser.info.backend_pid
        refused = run_command(plain, "cutover", "--reverse", str(ends.path))
        session.execute("ROLLBACK PREPARED 'left'")
    assert refused.returncode in REFUSED.values()
    for line in (
        f"no daemon applies slot '{plain.slot}'; the last one ended: of a fleet",
        "1 transactions are prepared: left",
        f'GRANT "{FENCER}" TO "{SOURCE_ROLE}"',
        f'GRANT pg_signal_backend TO "{SOURCE_ROLE}"',
        f"process {pid} (role ",
        "public.item have no replica identity",
        "the target gets nothing of public.item: published, with rows",
        "1 commands of the publisher are still to run on the target: CREATE or DROP INDEX CONCURRENTLY",
    ):
        assert line in refused.stderr, line
    ends.target.execute("UPDATE parapply.ddl SET outcome = 'applied'")
    # From 18 on a publication breaks such a table also.
    ends.target.execute(
        "ALTER TABLE item REPLICA IDENTITY FULL; ALTER TABLE item ADD COLUMN made int GENERATED ALWAYS AS (1) STORED"
    )
    looked = ends.run("--dry-run")
    assert "still to run" not in looked.stderr
    ((is_broken,),) = ends.target.rows("SELECT current_setting('server_version_num')::int >= 180000")
    assert ("public.item have no replica identity" in looked.stderr) is is_broken
    ends.target.execute("ALTER TABLE item REPLICA IDENTITY DEFAULT, DROP CONSTRAINT item_pkey, ADD PRIMARY KEY (id)")
    assert "no replica identity" not in ends.run("--dry-run").stderr
    ends.target.execute("ALTER TABLE item REPLICA IDENTITY DEFAULT; CREATE PUBLICATION pub_back FOR TABLE item")
    assert "the publication of the way back leaves out public.evt" in ends.run("--dry-run").stderr
    for part in ("evt WHERE (n > 0)", "evt (n)"):
        ends.target.execute(f"ALTER PUBLICATION pub_back SET TABLE item, {part}")
        assert "has a row filter or a column list for public.evt" in ends.run("--dry-run").stderr
    _check_partitioned(ends)
    ends.target.execute("DROP PUBLICATION pub_back")
    elsewhere = new_database(ends.target.server, "elsewhere")
    ends.write_file(Route(source=elsewhere, target=ends.source, source_dsn=elsewhere.source_role_dsn))
    wrong = ends.run("--dry-run")
    assert wrong.returncode == 2
    assert f"source.dsn of the way back leads to the database '{elsewhere.dbname}'" in wrong.stderr
    ends.check_nothing_left()


def _check_partitioned(ends: Ends) -> None:
    """Check a root without partitions, which the publication of the way back does not name, names, or has a part of."""
    root = f"CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id); ALTER TABLE root OWNER TO {TARGET_ROLE}"
    leaf = f"CREATE TABLE leaf PARTITION OF root DEFAULT; ALTER TABLE leaf OWNER TO {TARGET_ROLE}"
    for database in (ends.source, ends.target):
        database.execute(root)
    ends.source.execute("ALTER PUBLICATION pub ADD TABLE root; ALTER PUBLICATION pub SET (publish_via_partition_root)")
    ends.target.execute("ALTER PUBLICATION pub_back SET TABLE item, evt")
    left_out = "the publication of the way back leaves out public.root"
    assert left_out in ends.run("--dry-run").stderr
    ends.target.execute("ALTER PUBLICATION pub_back ADD TABLE root")
    assert "public.root" not in ends.run("--dry-run").stderr
    for database in (ends.source, ends.target):
        database.execute(leaf)
    ends.target.execute("ALTER PUBLICATION pub_back SET TABLE item, evt, leaf")
    looked = ends.run("--dry-run")
    assert left_out not in looked.stderr
    assert "the publication of the way back names only partitions of public.root" in looked.stdout
    ends.source.execute("ALTER PUBLICATION pub DROP TABLE root")


def test_columns_that_the_stream_leaves_out_are_not_overwritten_by_the_way_back(ends: Ends) -> None:
    """Of a column on both ends that no list names only the source has values: it refuses before clients wait.

    Where only the source has the column, the way back does not touch it, and that is said.
    """
    for database in (ends.source, ends.target):
        database.execute("ALTER TABLE item ADD c text, ADD made int GENERATED ALWAYS AS (1) STORED")
    ends.source.execute("ALTER PUBLICATION pub SET TABLE item (id, v), evt")
    daemon = ends.start(ends.ahead)
    ends.source.execute("INSERT INTO item VALUES (1, 1, 'only here')")
    daemon.wait_caught_up()
    refused = ends.run()
    assert (refused.returncode, "fencing" in refused.stdout) == (REFUSED["source"], False), refused
    assert "the publication leaves out public.item.c, and the target has them also" in refused.stderr
    ends.check_nothing_left()
    ends.target.execute("ALTER TABLE item DROP c")
    looked = ends.run("--dry-run")
    assert looked.returncode == 0, looked
    assert "warning: public.item.c: the publication leaves columns out, which the target does not have" in looked.stdout
    daemon.stop()


def test_without_a_free_slot_or_origin_there_is_no_way_back(  # noqa: PLR0917  fixtures
    own_servers: OwnServers,
    new_database: NewDatabase,
    tmp_path: Path,
    run_command: RunCommand,
    start_daemon: StartDaemon,
    new_slot: Callable[[Route], None],
) -> None:
    """A way back that asks for `origin = none` needs origins of its own, and any needs a slot on the target."""
    server = own_servers(settings={"max_replication_slots": 1, "max_active_replication_origins": 4})
    both = Ends(new_database(server, "a"), new_database(server, "b"), tmp_path, run_command, start_daemon)
    new_slot(both.ahead)
    both.path.write_text(both.path.read_text().replace("[target]", 'origin = "none"\n[target]'))
    both.start(both.ahead)
    refused = both.run()
    assert refused.returncode in REFUSED.values(), refused
    assert "origins_needed" in refused.stderr
    assert "slots_exhausted" in refused.stderr
    both.check_nothing_left()


def test_the_file_of_the_way_back_is_printed_without_passwords(
    ends: Ends, run_command: RunCommand, init_route: Callable[[Route], None]
) -> None:
    """`--print-reverse` gives a file that the command takes, with both ends exchanged."""
    init_route(ends.ahead)
    secret = f"{ends.ahead.source_dsn} password=geheim"
    route = Route(source=ends.source, target=ends.target, slot=ends.ahead.slot, settings=FAST, source_dsn=secret)
    printed = run_command(route, "cutover", "--print-reverse")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert "geheim" not in printed.stdout
    assert f'slot = "{ends.ahead.slot}_back"' in printed.stdout
    # The roles are the operator's to choose: here each end has one for each direction.
    text = printed.stdout.replace(TARGET_ROLE, "other").replace(FENCER, TARGET_ROLE).replace("other", FENCER)
    ends.path.write_text(text)
    looked = ends.run("--dry-run")
    assert "no daemon applies" in looked.stderr
    assert f"publication '{ends.ahead.slot}_back'" in looked.stdout


def test_a_way_back_that_was_ready_begins_later_if_the_daemon_applies_more(ends: Ends) -> None:
    """Changes that the daemon applies after that must not be sent back: they would be on the old source twice.

    A command that goes on does not begin to wait for a daemon that is stopped.
    """
    daemon = ends.start(ends.ahead)
    ends.source.execute("INSERT INTO evt VALUES (1)")
    daemon.wait_caught_up()
    ends.run("--verify", "none", killed_at="cutover_turning")
    _defy(ends, 2)
    ends.source.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{ends.ahead.slot}'")
    try:
        ends.source.execute("SELECT pg_reload_conf()")
        ends.source.wait_until("SELECT current_setting('synchronous_standby_names') <> ''")
        done = ends.run("--verify", "none")
    finally:
        ends.source.execute("ALTER SYSTEM RESET synchronous_standby_names")
        ends.source.execute("SELECT pg_reload_conf()")
        ends.source.wait_until("SELECT current_setting('synchronous_standby_names') = ''")
    assert (done.returncode, "has commits wait for the daemon of slot" in done.stderr) == (3, True), done
    assert ends.run("--verify", "none").returncode == 3
    ends.start(ends.ahead)
    assert ends.run("--verify", "none").returncode == 0
    back = ends.start(ends.back)
    ends.target.execute("INSERT INTO evt VALUES (3)")
    back.finish()
    assert ends.source.rows("SELECT n FROM evt ORDER BY 1") == ends.target.rows("SELECT n FROM evt ORDER BY 1")
    assert ends.source.rows("SELECT n FROM evt ORDER BY 1") == [(1,), (2,), (3,)]


def test_a_late_write_is_found_by_the_command_that_goes_on_at_the_end(ends: Ends) -> None:
    """Killed before it has dropped the old slot: that slot alone has what was committed in spite of the fence."""
    daemon = ends.start(ends.ahead)
    ends.source.execute("INSERT INTO evt VALUES (1)")
    daemon.wait_caught_up()
    ends.run("--verify", "none", killed_at="cutover_ending")
    _defy(ends, 2)
    for _ in range(2):
        done = ends.run("--verify", "none")
        assert (done.returncode, "1 transactions were committed on the source after" in done.stderr) == (1, True), done
    # Changes of the way back look alike there. The slot stays all the same, until the operator ends it.
    back = ends.start(ends.back)
    ends.target.execute("INSERT INTO evt VALUES (3)")
    back.wait_caught_up()
    done = ends.run("--verify", "none")
    assert (done.returncode, "is not known" in done.stderr) == (1, True), done
    slots = f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{ends.ahead.slot}'"
    assert ends.source.rows(slots) == [(1,)]
    assert ends.run_other("drop", "--yes").returncode == 0
    assert ends.source.rows(slots) == [(0,)]
    back.stop()


def test_a_way_back_that_a_command_of_the_operators_starts_writes_nothing_late(ends: Ends, tmp_path: Path) -> None:
    """Its changes on the old source are not taken for writes of a session that the fence did not hold."""
    ends.start(ends.ahead)
    commands = tmp_path / "commands.toml"
    commands.write_text('[cutover.commands]\nafter_opening = ["true"]\n')
    with ends.held("cutover_hook_begun", *_UNCOMPARED, "--config", str(commands)) as done:
        back = ends.start(ends.back)
        ends.target.execute("INSERT INTO evt VALUES (1)")
        ends.source.wait_until("SELECT count(*) = 1 FROM evt")
    assert (done[0].returncode, done[0].stderr) == (0, ""), done
    back.stop()


@pytest.mark.parametrize("is_committed", [True, False])
def test_what_is_prepared_behind_the_fence_is_late(ends: Ends, *, is_committed: bool) -> None:
    """Applied as prepared, it would be committed on the old source only once the daemon is stopped."""
    ends.source.rows(f"SELECT pg_drop_replication_slot('{ends.ahead.slot}')")
    ends.ahead = replace(ends.ahead, settings=TWO_PHASE)
    make_slot(ends.ahead, is_two_phase=True)
    daemon = ends.start(ends.ahead)
    keep = (*_UNCOMPARED, "--keep-role", TARGET_ROLE)
    with ends.source.connect(user=TARGET_ROLE) as kept:
        with ends.held("cutover_stopping", *keep) as done:
            for text in ("BEGIN", "INSERT INTO evt VALUES (7)", "PREPARE TRANSACTION 'late'"):
                kept.execute(text)
            ends.target.wait_until("SELECT EXISTS (SELECT FROM parapply.undecided)")
            daemon.kill()
            if is_committed:
                kept.execute("COMMIT PREPARED 'late'")
        assert done[0].returncode == REFUSED["source"], done[0]
        assert ("1 transactions were committed" if is_committed else "no end yet: late, parapply_") in done[0].stderr
        if not is_committed:
            kept.execute("COMMIT PREPARED 'late'")
        ends.start(ends.ahead)
        assert ends.run(*keep).returncode == 0
    assert ends.target.rows("SELECT n FROM evt") == [(7,)]
    assert n_prepared(ends.target) == 0


def test_what_is_prepared_on_the_target_is_refused_before_the_turn(ends: Ends) -> None:
    """A way back with two_phase would get of it the outcome alone, and its rows would be on the new primary only."""
    ends.ahead, ends.back = replace(ends.ahead, settings=TWO_PHASE), replace(ends.back, settings=TWO_PHASE)
    ends.source.rows(f"SELECT pg_drop_replication_slot('{ends.ahead.slot}')")
    make_slot(ends.ahead, is_two_phase=True)
    ends.path.write_text(ends.path.read_text().replace("[source]", "[source]\ntwo_phase = true"))
    ends.start(ends.ahead)
    for is_late in (False, True):
        write = ["BEGIN", "INSERT INTO evt VALUES (8)", "PREPARE TRANSACTION 'kept'"]
        with ends.target.connect(user=TARGET_ROLE) as kept:
            if is_late:
                with ends.held("cutover_stopping", *_UNCOMPARED) as done:
                    for text in write:
                        kept.execute(text)
                refused = done[0]
            else:
                for text in write:
                    kept.execute(text)
                refused = ends.run(*_UNCOMPARED)
                ends.check_nothing_left()
            assert (refused.returncode, "target: 1 transactions are prepared: kept;" in refused.stderr) == (4, True), (
                refused
            )
            kept.execute("COMMIT PREPARED 'kept'")
    assert ends.run(*_UNCOMPARED).returncode == 0
    back = ends.start(ends.back)
    ends.target.execute("INSERT INTO evt VALUES (9)")
    back.wait_caught_up()
    assert ends.source.rows("SELECT n FROM evt") == [(9,)]


def _defy(ends: Ends, number: int) -> None:
    with ends.source.connect(options="-c default_transaction_read_only=off") as session:
        session.execute(f"INSERT INTO evt VALUES ({number})".encode())


def test_sessions_from_behind_a_fence_end_when_it_is_lifted(ends: Ends) -> None:
    """A session that began while its database was read only would stay so: a client's pool has to connect again."""
    ends.start(ends.ahead)
    assert ends.run(*_UNCOMPARED, killed_at="cutover_turning").returncode == -9
    with ends.source.connect(user=TARGET_ROLE) as behind:
        assert behind.execute("SHOW transaction_read_only").fetchone() == ("on",)
        behind.rollback()
        assert ends.run("--undo").returncode == 0
        with pytest.raises(psycopg.OperationalError):
            behind.execute("INSERT INTO evt VALUES (1)")
    with ends.source.connect(user=TARGET_ROLE) as after:
        after.execute("INSERT INTO evt VALUES (2)")

    ends.start(ends.ahead)
    assert ends.run(*_UNCOMPARED).returncode == 0
    with ends.source.connect(user=TARGET_ROLE) as behind:
        ends.start(ends.back)
        back = ends.run("--back", *_UNCOMPARED)
        assert (back.returncode, back.stderr) == (0, "")
        with pytest.raises(psycopg.OperationalError):
            behind.execute("INSERT INTO evt VALUES (3)")
    ends.source.execute("INSERT INTO evt VALUES (4)")


def test_while_one_direction_is_under_way_the_other_names_its_command(ends: Ends) -> None:
    """Killed on the way back, the command without --back says how to go on, and never that there is no slot."""
    ends.start(ends.ahead)
    assert ends.run(*_UNCOMPARED).returncode == 0
    ends.start(ends.back)
    hint = f"--reverse {ends.path} --back`"
    for point in ("cutover_fencing", "cutover_turning"):
        assert ends.run("--back", *_UNCOMPARED, killed_at=point).returncode == -9
        for words in ((), ("--undo",)):
            said = ends.run(*words)
            assert said.returncode == REFUSED["target"]
            assert f"under way, at the step {point.removeprefix('cutover_')}. " in said.stderr
            assert hint in said.stderr
        dropped = ends.run_other("drop", "--yes")
        assert dropped.returncode == REFUSED["source"]
        assert "is the way back of a cut-over that is under way there" in dropped.stderr
    # Nor does it stay half undone where the state of the stream ahead was lost otherwise.
    ends.target.execute("BEGIN READ WRITE; DROP SCHEMA parapply CASCADE; COMMIT")
    assert ends.run("--back", "--undo").returncode == 0
    ends.target.execute("INSERT INTO evt VALUES (1)")

    ends.start(ends.back)
    assert ends.run("--back", *_UNCOMPARED, killed_at="cutover_ending").returncode == -9
    said = ends.run()
    assert said.returncode == REFUSED["target"]
    assert hint in said.stderr
    assert "--undo" not in said.stderr
    assert ends.run("--back", *_UNCOMPARED).returncode == 0
    ends.source.execute("INSERT INTO evt VALUES (2)")
