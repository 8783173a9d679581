"""`parapply capture` and `parapply replay`: what is kept is applied as the built-in subscription applies the stream."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import pytest

from parapply import failpoints
from parapply.capture.blocks import BlockKind
from parapply.capture.folder import CaptureLimits, CaptureWriter, groups, last_timeline, look, names, read
from parapply.capture.recorder import Recorder
from parapply.login import Login
from parapply.model import FRAME_HEADER_BYTES
from parapply.source import slot
from tests import build
from tests.fixtures import warm
from tests.fixtures.builtin import BuiltinSubscription
from tests.fixtures.captures import LATER, TABLES, Capture, replay, write_mixed
from tests.fixtures.daemon import _environment as environment
from tests.fixtures.databases import create_end
from tests.fixtures.table_rows import contents
from tests.fixtures.two_phase import decide, write_prepared

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path
    from subprocess import CompletedProcess

    import psycopg

    from tests.fixtures.databases import Database
    from tests.fixtures.servers import NewDatabase, OwnServers

pytestmark = pytest.mark.bare_target

#: Passings at which a capture is killed, where it is not the first.
_COUNTS = {"capture_written": (1, 5), "capture_synced": (1, 4), "capture_reported": (1, 2)}


def test_a_key_that_came_after_the_rows_identifies_them(capture: Capture, target_db: Database) -> None:
    """A table is made and filled, and gets its key afterwards, as by `pgbench -i`: its updates and deletes apply."""
    capture.go_on()
    capture.source.execute("CREATE TABLE late (id int NOT NULL, v text)")
    capture.source.execute("INSERT INTO late SELECT g, 'old' FROM generate_series(1, 100) AS g")
    capture.go_on()
    capture.source.execute("ALTER TABLE late ADD PRIMARY KEY (id)")
    capture.source.execute("UPDATE late SET v = 'new' WHERE id < 20; DELETE FROM late WHERE id > 90")
    capture.go_on()
    done = replay(capture.folder, target_db)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(target_db, "public") == contents(capture.source, "public")


@pytest.mark.crash
@pytest.mark.timeout(400)
def test_a_killed_capture_goes_on_and_replays_as_the_subscription(
    capture: Capture, new_database: NewDatabase, target_db: Database
) -> None:
    """Killed at each point, over and over, with load in between: nothing is missing, nothing comes twice.

    The replay is also killed, between its commits and at its records.
    """
    source = capture.source
    builtin_db = new_database(target_db.server)
    builtin_db.execute(TABLES + LATER)
    subscription = BuiltinSubscription(source, builtin_db, two_phase=True)
    turn = 0
    for point in failpoints.CAPTURE_NAMES:
        for count in _COUNTS.get(point, (1,)):
            killed = capture.run("--file-bytes", "40000", environ={"PARAPPLY_FAILPOINT": f"{point}:kill:{count}"})
            assert killed.returncode == -signal.SIGKILL, (point, killed.stderr)
            if point not in ("capture_begun", "capture_slot"):
                turn += 1
                write_mixed(source, turn)
    capture.go_on("--file-bytes", "40000")
    found = look(capture.folder)
    assert len(names(capture.folder)) > 2
    assert {place.header.kind for place in found.places} >= {BlockKind.RESUMED, BlockKind.POSITION, BlockKind.END}
    subscription.wait_caught_up()
    for point in ("committed:kill:3", "before_commit:kill:5", "advanced:kill:2"):
        killed = replay(capture.folder, target_db, "--set", "apply.workers=3", environ={"PARAPPLY_FAILPOINT": point})
        assert killed.returncode == -signal.SIGKILL, (point, killed.stderr)
    done = replay(capture.folder, target_db, "--set", "apply.workers=3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = contents(builtin_db, "public")
    assert len(wanted["evt"]) > 3000
    assert contents(target_db, "public") == wanted


def test_a_redacted_capture_holds_no_word_and_its_keys_meet(capture: Capture, target_db: Database) -> None:
    """No word that was written is in any file; rows are as many, and join as before."""
    words = ["Gutenberg", "mühlheim", "Quarz-Uhr", "17.320508", "2019-03-14", "5772156649"]
    key = {"PARAPPLY_REDACT_KEY": "0123456789abcdef" * 4}
    capture.source.execute("CREATE TABLE part (name text PRIMARY KEY, j jsonb, n bigint, d numeric, t date);"
                           " CREATE TABLE uses (part text, n int)")  # fmt: skip
    capture.go_on("--redact", environ=key)
    values = "'{0}', '{{\"{0}\": \"{1}\", \"n\": 5772156649}}', 5772156649, 17.320508, '2019-03-14'"
    capture.source.execute(f"INSERT INTO part VALUES ({values.format('Gutenberg', 'mühlheim')}),"
                           f" ({values.format('Quarz-Uhr', 'Gutenberg')});"
                           " INSERT INTO uses SELECT name, g FROM part, generate_series(1, 4) AS g")  # fmt: skip
    write_prepared(capture.source, f"{capture.source.dbname}_Gutenberg", "INSERT INTO uses VALUES ('mühlheim', 9)")
    decide(capture.source, f"{capture.source.dbname}_Gutenberg", "COMMIT")
    wrong = capture.run("--redact", environ={"PARAPPLY_REDACT_KEY": "f" * 40})
    assert (wrong.returncode, "another key" in wrong.stderr) == (2, True)
    assert capture.run().returncode == 2
    capture.go_on("--redact", environ=key)
    found = look(capture.folder)
    kept = b"".join([read(capture.folder, place) for place in found.places])
    assert [word for word in words if word.encode() in kept] == []
    assert b"mood" in kept
    done = replay(capture.folder, target_db)
    assert done.returncode == 0, done.stdout + done.stderr
    joined = (
        "SELECT count(*), count(DISTINCT p.name), sum(length(p.name)) FROM part AS p JOIN uses AS u ON u.part = p.name"
    )
    assert target_db.rows(joined) == capture.source.rows(joined)
    assert target_db.rows("SELECT count(*) FROM uses") == [(9,)]
    refused = replay(capture.folder, target_db, "--copy-of", capture.source.dsn)
    assert (refused.returncode, "is redacted" in refused.stderr) == (2, True)


def test_other_settings_are_predicted_from_one_run(capture: Capture, target_db: Database, tmp_path: Path) -> None:
    """The first group runs, the others are predicted from its log, and what has run before is shown beside it."""
    capture.go_on()
    capture.source.execute(
        "DO $$ BEGIN FOR i IN 1..3000 LOOP INSERT INTO gone VALUES (i + 100); COMMIT; END LOOP; END $$"
    )
    capture.go_on()
    groups = ("--run", "apply.workers=2", "--run", "apply.workers=4 target.synchronous_commit=off")
    options = (*groups, "--predict", str(tmp_path / "log"), "--json")
    refused = replay(capture.folder, target_db, *groups, "--run", "source.streaming=off", *options[-3:])
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "apply.workers is in the first --run, so name it in the others" in refused.stderr
    wrong = replay(capture.folder, target_db, "--run", "apply.workers=2", "--run",
                    "apply.workers=2 spill.directory=/tmp", *options[-3:])  # fmt: skip
    assert (wrong.returncode, "spill.directory cannot be predicted" in wrong.stderr) == (2, True)
    done = replay(capture.folder, target_db, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    first, other = json.loads(done.stdout)["runs"]
    assert (first["is_done"], first["predicted"], other["is_done"], other["tables"]) == (True, None, False, {})
    assert 0 < other["predicted"]["least_s"] <= other["predicted"]["seconds"] <= other["predicted"]["most_s"]
    measured = json.loads(replay(capture.folder, target_db, *groups, "--json").stdout)
    assert measured["different_tables"] == []
    beside = json.loads(replay(capture.folder, target_db, *options).stdout)["runs"]
    assert beside[0] == first
    assert (beside[1]["seconds"], beside[1]["predicted"]) == (measured["runs"][1]["seconds"], other["predicted"])


@pytest.mark.pg_majors(15, 18)
def test_t58_prepared_while_the_slot_was_made(capture: Capture, target_db: Database) -> None:
    """T-58: prepared before the slot had its position, each comes once with its COMMIT PREPARED, whole or streamed."""
    source, gids = capture.source, [f"{capture.source.dbname}_{n}" for n in range(2)]
    waits = ("SELECT count(*) FROM pg_locks AS l JOIN pg_replication_slots AS s ON s.active_pid = l.pid"
             f" WHERE s.slot_name = '{capture.slot}' AND NOT l.granted AND l.transactionid = '{{}}'::xid")  # fmt: skip

    def wait_for(other: psycopg.Connection, running: Future[CompletedProcess[str]]) -> None:
        ((xid,),) = other.execute("SELECT pg_current_xact_id()::text").fetchall()
        while source.rows(waits.format(xid)) == [(0,)] and not running.done():
            wait([running], timeout=0.02)

    with ThreadPoolExecutor(1) as threads, source.session("first") as first, source.session("second") as second:
        # The slot waits for all that is open when it begins, and then for all that is open at the end of that wait.
        first.execute("BEGIN; SELECT pg_current_xact_id()")
        running = threads.submit(capture.run)
        wait_for(first, running)
        second.execute("BEGIN; SELECT pg_current_xact_id()")
        first.execute("COMMIT")
        wait_for(second, running)
        for n, gid in enumerate(gids):
            write_prepared(source, gid, f"INSERT INTO evt SELECT {n}, 'x' FROM generate_series(1, 5)")
        second.execute("COMMIT")
        begun = running.result()
    assert begun.returncode == 0, begun.stderr
    decide(source, gids[0], "COMMIT")
    source.execute("INSERT INTO evt VALUES (2, 'has both streamed that are prepared')")
    decide(source, gids[1], "COMMIT")
    capture.go_on()
    found = look(capture.folder)
    kinds = [frame[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + 1] for place in found.places
             if place.header.kind is BlockKind.FRAMES
             for group in groups(capture.folder, place)[1] for frame in group.frames]  # fmt: skip
    assert kinds.count(b"K") == 2
    assert {b"P", b"p"} & set(kinds), kinds
    done = replay(capture.folder, target_db)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(target_db, "public") == contents(source, "public")


def test_a_torn_file_is_refused_by_name_and_the_capture_goes_on(capture: Capture, target_db: Database) -> None:
    """A file that ends within a block is named; the capture asks for it again, and rows of before are copied."""
    capture.source.execute("INSERT INTO item SELECT g, 'before' FROM generate_series(-50, -1) AS g")
    capture.go_on()
    capture.source.execute("UPDATE item SET v = 'changed' WHERE id > -10; INSERT INTO evt VALUES (1, 'first')")
    # Killed when the block is written and the publisher knows nothing of it.
    killed = capture.run(environ={"PARAPPLY_FAILPOINT": "capture_synced:kill:3"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = capture.folder / names(capture.folder)[-1]
    last.write_bytes(last.read_bytes()[:-5])
    torn = replay(capture.folder, target_db)
    assert (torn.returncode, f"{last.name} is not whole from byte" in torn.stderr) == (2, True), torn.stderr
    capture.go_on()
    # The source stands still, and has the rows of before in their last state: the changes are applied once more.
    done = replay(
        capture.folder, target_db, "--copy-of", capture.source.dsn, "--set", "conflict.insert_exists=apply_remote"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(target_db, "public")["item"] == contents(capture.source, "public")["item"]


def test_roles_with_the_documented_rights_suffice(capture: Capture, target_db: Database) -> None:
    """docs/PRIVILEGES.md: REPLICATION alone captures, also from schemas that the role may not use.

    The owner of the scratch database replays, over and over, with SELECT on the rows of before. Files are the owner's.
    """
    source, name = capture.source, f"role_{capture.source.dbname}"
    capture.source.execute("CREATE SCHEMA shop; CREATE TABLE shop.good (id int PRIMARY KEY, v text)")
    source.execute(f"CREATE ROLE {name}_c LOGIN REPLICATION; CREATE ROLE {name}_r LOGIN;"
                   f" GRANT USAGE ON SCHEMA shop TO {name}_r; GRANT SELECT ON ALL TABLES IN SCHEMA public, shop"
                   f" TO {name}_r")  # fmt: skip
    target_db.execute(f"CREATE ROLE {name}_t LOGIN; GRANT SET ON PARAMETER session_replication_role TO {name}_t;"
                      f" ALTER DATABASE {target_db.dbname} OWNER TO {name}_t")  # fmt: skip
    try:
        source.execute("INSERT INTO shop.good SELECT g, 'before' FROM generate_series(1, 3) AS g")
        capture.go_on(source_dsn=source.dsn_with(user=f"{name}_c"))
        source.execute("UPDATE shop.good SET v = 'changed' WHERE id = 2; INSERT INTO item VALUES (1, 'new')")
        capture.go_on(source_dsn=source.dsn_with(user=f"{name}_c"))
        # A refusal while it goes on is about a privilege, not about the folder.
        source.execute("REVOKE SELECT ON pg_catalog.pg_enum FROM PUBLIC")
        refused = capture.run(source_dsn=source.dsn_with(user=f"{name}_c"))
        source.execute("GRANT SELECT ON pg_catalog.pg_enum TO PUBLIC")
        assert (refused.returncode, "permission denied for table pg_enum" in refused.stderr) == (3, True), refused
        assert "GRANT what is missing" in refused.stderr
        rights = "has_schema_privilege($1, 'shop', 'USAGE') OR has_table_privilege($1, 'item', 'SELECT')"
        assert source.rows(f"SELECT {rights.replace('$1', repr(f'{name}_c'))}") == [(False,)]
        modes = [capture.folder, *capture.folder.iterdir()]
        assert [oct(path.stat().st_mode & 0o777) for path in modes] == ["0o700", *["0o600"] * (len(modes) - 1)]
        words = ["replay", str(capture.folder), "--target", target_db.dsn_with(user=f"{name}_t"),
                 "--copy-of", source.dsn_with(user=f"{name}_r"), "--set", "conflict.insert_exists=apply_remote",
                 "--run", "apply.workers=1", "--run", "apply.workers=3"]  # fmt: skip
        done = warm.run(words, environment(None), 100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert contents(target_db, "shop") == contents(source, "shop")
    finally:
        target_db.execute(f"ALTER DATABASE {target_db.dbname} OWNER TO CURRENT_USER; DROP OWNED BY {name}_t CASCADE;"
                          f" DROP ROLE {name}_t")  # fmt: skip
        source.execute(f"DROP OWNED BY {name}_c, {name}_r; DROP ROLE {name}_c, {name}_r")


def test_another_readers_slot_and_database_are_never_touched(capture: Capture, target_db: Database) -> None:
    """A slot that exists is refused, and so is a database with anything in it; a gap in the slot is seen."""
    capture.source.execute(f"SELECT pg_create_logical_replication_slot('{capture.slot}', 'pgoutput', false, true)")
    before = capture.source.rows(
        f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{capture.slot}'"
    )
    refused = capture.run()
    assert (refused.returncode, "exists, and this folder has no capture" in refused.stderr) == (3, True)
    query = f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{capture.slot}'"
    assert capture.source.rows(query) == before
    capture.source.execute(f"SELECT pg_drop_replication_slot('{capture.slot}')")
    other = capture._replace(folder=capture.folder.with_name("other"))
    other.go_on()
    target_db.execute("CREATE TABLE mine (a int)")
    refused = replay(other.folder, target_db)
    assert (refused.returncode, "it has public.mine" in refused.stderr) == (4, True), refused.stderr
    capture.source.execute("INSERT INTO evt VALUES (1, '')")
    capture.source.execute(f"SELECT pg_replication_slot_advance('{capture.slot}', pg_current_wal_lsn())")
    last = other.folder / names(other.folder)[-1]
    last.write_bytes(last.read_bytes() + b"torn")
    kept = last.read_bytes()
    refused = other.run()
    assert (refused.returncode, "cannot go on, and is whole up to" in refused.stderr) == (2, True), refused.stderr
    assert last.read_bytes() == kept


def test_a_slot_that_is_read_or_moved_by_another_gives_no_capture(capture: Capture, tmp_path: Path) -> None:
    """Neither beside a daemon that reads it in ranges, nor from where another moved it after it was looked at."""
    capture.go_on()
    claimed = f"SELECT pg_advisory_lock(hashtextextended('parapply reads {capture.slot}', 0))"
    with capture.source.session(claimed) as other:
        other.execute(claimed)
        busy = capture.run()
    assert (busy.returncode, "is read by another parapply" in busy.stderr) == (3, True), busy.stderr
    assert "trying again" not in busy.stderr
    environ = {"PARAPPLY_FAILPOINT": "capture_cut:hold", "PARAPPLY_FAILPOINT_DIR": str(tmp_path)}
    held = tmp_path / "capture_cut.held"
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(capture.run, environ=environ)
        while not held.exists() and not running.done():
            wait([running], timeout=0.02)
        capture.source.execute("INSERT INTO evt VALUES (1, 'passed over')")
        capture.source.execute(f"SELECT pg_replication_slot_advance('{capture.slot}', pg_current_wal_lsn())")
        held.unlink()
        moved = running.result()
    assert (moved.returncode, "was moved by another reader" in moved.stderr) == (3, True), moved.stderr
    refused = capture.run()
    assert (refused.returncode, "cannot go on, and is whole up to" in refused.stderr) == (2, True), refused.stderr


def test_a_capture_never_goes_on_with_another_database(capture: Capture, target_db: Database) -> None:
    """Nor where it has only begun: its first block would name another one than its rows are of."""
    killed = capture.run(environ={"PARAPPLY_FAILPOINT": "capture_begun:kill"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    target_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    refused = capture.run(source_dsn=target_db.dsn)
    assert (refused.returncode, f"was begun in database {capture.source.dbname!r}" in refused.stderr) == (2, True), (
        refused
    )


@pytest.mark.crash
def test_a_kept_capture_goes_on_after_a_promotion(own_servers: OwnServers, target_db: Database, tmp_path: Path) -> None:
    """Over and over: what came on the new timeline was not lost by its beginning."""
    server = own_servers()
    source = create_end(server, "source")
    capture = Capture(source, tmp_path / "day")
    source.execute(TABLES + "CREATE PUBLICATION pub FOR ALL TABLES")
    capture.go_on()
    source.forget()
    server.stop()
    (server.data_dir / "standby.signal").touch()
    server.start()
    server.execute("SELECT pg_promote(true, 60)")
    for number in range(3):
        source.execute(f"INSERT INTO evt VALUES ({number}, 'later')")
        capture.go_on()
    assert last_timeline(capture.folder, look(capture.folder)) == 2
    done = replay(capture.folder, target_db)
    assert done.returncode == 0, done.stdout + done.stderr
    assert target_db.rows("SELECT n FROM evt ORDER BY 1") == [(0,), (1,), (2,)]


async def test_a_file_begins_with_the_announcements_of_its_first_row(capture: Capture) -> None:
    """Not with a later one that came together with that row: a replay which begins there would misread it.

    Around a partition is its root, which has no other sign of it there (T-28).
    """
    capture.go_on()
    writer = CaptureWriter(capture.folder, CaptureLimits(0, 1))
    writer.go_on(look(capture.folder))
    first, second = [build.relation(*[build.ColumnSpec(name) for name in names]) for names in ("ab", "ba")]
    leaf = build.relation(*[build.ColumnSpec(name) for name in "ab"], oid=77, name="leaf")
    row = [build.begin(), build.insert(build.row(build.text(b"x"), build.text(b"y"))), build.commit()]
    async with await slot.connect(Login(capture.source.dsn), application_name="test") as conn:
        recorder = Recorder(writer, conn, None, is_parallel=False)
        for messages in ([first, leaf, *row], [*row, second, *row]):
            await recorder.take([build.xlog_data(one) for one in messages], 1)
            recorder.write()
    writer.close()
    places = look(capture.folder).places
    known, frames = [
        [frame[FRAME_HEADER_BYTES:] for group in groups(capture.folder, place)[1] for frame in group.frames]
        for place in places[-2:]
    ]
    assert [place.header.kind for place in places[-2:]] == [BlockKind.RELATIONS, BlockKind.FRAMES]
    assert (known, frames) == ([first, leaf, first], [*row, second, *row])


def test_a_folder_is_locked_before_it_is_looked_through(capture: Capture) -> None:
    """Blocks that another capture reports after the look would be cut off, and come from nowhere again."""
    capture.go_on()
    other = os.open(capture.folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused = capture.run(environ={"PARAPPLY_FAILPOINT": "capture_looked:exit"})
    finally:
        os.close(other)
    assert (refused.returncode, "another process captures into" in refused.stderr) == (2, True), refused


@pytest.mark.pg_majors(15, 18)
def test_changes_that_a_missing_publication_leaves_out_end_a_capture(capture: Capture, target_db: Database) -> None:
    """From 18 on the publisher only warns. All of before is kept, and the same command does not go on behind the gap.

    Up to 17 it never goes on. The advice is about the capture, and drops nothing.
    """
    capture.go_on()
    capture.source.execute("INSERT INTO evt VALUES (1, 'kept')")
    capture.go_on()
    capture.source.execute("DROP PUBLICATION pub; INSERT INTO evt VALUES (2, 'left out')")
    capture.source.execute("CREATE PUBLICATION pub FOR ALL TABLES; INSERT INTO evt VALUES (3, 'later')")
    for _ in range(2):
        refused = capture.run()
        assert (refused.returncode, "a publication was missing" in refused.stderr) == (2, True), refused
        assert "it can be replayed; to capture more name another folder" in refused.stderr
    done = replay(capture.folder, target_db)
    assert done.returncode == 0, done.stdout + done.stderr
    assert target_db.rows("SELECT n FROM evt") == [(1,)]


def test_a_capture_ends_where_its_room_ends_and_goes_on_with_more(capture: Capture, target_db: Database) -> None:
    """Exit 1 and a line say that --max-bytes is reached; the slot keeps its place. Two settings leave equal tables."""
    capture.go_on()
    write_mixed(capture.source, 1)
    full = capture.run("--max-bytes", "20000")
    assert (full.returncode, "--max-bytes = 20000 is reached" in full.stderr) == (1, True), full.stderr
    assert sum(path.stat().st_size for path in capture.folder.iterdir()) <= 20_000
    capture.go_on()
    done = replay(capture.folder, target_db, "--speed", "1000", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(target_db, "public")["evt"] == contents(capture.source, "public")["evt"]
    groups = ("--run", "apply.workers=1", "--run", "apply.workers=3 apply.max_batch_transactions=2")
    both = replay(capture.folder, target_db, *groups, "--json")
    assert both.returncode == 0, both.stdout + both.stderr
    shown = json.loads(both.stdout)
    assert (shown["different_tables"], [run["is_done"] for run in shown["runs"]]) == ([], [True, True])
    assert shown["runs"][0]["tables"] == json.loads(done.stdout)["runs"][0]["tables"]
    assert contents(target_db, "public")["evt"] == contents(capture.source, "public")["evt"]
