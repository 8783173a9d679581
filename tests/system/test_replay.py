"""`parapply replay` with several groups: settings of the target's server, and the statements about each run."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.captures import replay

if TYPE_CHECKING:
    from tests.fixtures.captures import Capture
    from tests.fixtures.databases import Database

pytestmark = pytest.mark.bare_target

#: The settings of each session that inserts into the table `gone`, wherever a replay makes it.
_SEEN = r"""
CREATE SCHEMA parapply_replay;
CREATE TABLE parapply_replay.seen (work_mem text, path text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO parapply_replay.seen VALUES (current_setting('work_mem'), current_setting('dynamic_library_path'));
    RETURN NULL;
END $$;
CREATE FUNCTION watch() RETURNS event_trigger LANGUAGE plpgsql SET search_path = pg_catalog, public AS $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'note') AND to_regclass('public.gone') IS NOT NULL THEN
        CREATE TRIGGER note AFTER INSERT ON public.gone FOR EACH ROW EXECUTE FUNCTION public.note();
        ALTER TABLE public.gone ENABLE ALWAYS TRIGGER note;
    END IF;
END $$;
CREATE EVENT TRIGGER watch ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION watch();
ALTER EVENT TRIGGER watch ENABLE ALWAYS;
"""
#: A value that is an option for work_mem unless it is quoted.
_PATH = r"$libdir:/a b\c' -c work_mem=9MB"


def _write(capture: Capture, n_transactions: int) -> None:
    capture.go_on()
    capture.source.execute(
        f"DO $$ BEGIN FOR i IN 1..{n_transactions} LOOP INSERT INTO gone VALUES (i); COMMIT; END LOOP; END $$"
    )
    capture.go_on()


def test_the_servers_settings_are_those_of_the_runs_sessions(capture: Capture, target_db: Database) -> None:
    """A session of each run has its group's settings, whatever signs they have; killed and gone on with, the same.

    Nothing is left on the server: a session that comes later has the server's own.
    """
    target_db.execute(_SEEN)
    _write(capture, 40)
    groups = ("--run", "apply.workers=2 apply.max_batch_transactions=5 server.WORK_MEM=5MB",
              "--run", f'apply.workers=2 server.work_mem=7168 "server.dynamic_library_path={_PATH}"')  # fmt: skip
    killed = replay(capture.folder, target_db, *groups, environ={"PARAPPLY_FAILPOINT": "committed:kill:3"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    query = "SELECT DISTINCT work_mem, path FROM parapply_replay.seen"
    assert target_db.rows(query) == [("5MB", "$libdir")]
    done = replay(capture.folder, target_db, *groups, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)
    assert [run["settings"] for run in shown["runs"]] == [
        "apply.workers=2 apply.max_batch_transactions=5 server.WORK_MEM=5MB",
        f"apply.workers=2 server.work_mem=7168 server.dynamic_library_path={_PATH}",
    ]
    assert target_db.rows(f"{query} ORDER BY 1") == [("5MB", "$libdir"), ("7MB", _PATH)]
    assert target_db.rows("SELECT count(*) >= 80 FROM parapply_replay.seen") == [(True,)]
    assert target_db.rows("SELECT * FROM pg_db_role_setting") == []
    with target_db.connect() as conn:
        assert conn.execute("SHOW work_mem").fetchone() == ("4MB",)


_REFUSED = {
    "server.shared_buffers=7MB": "no session can set it, and the target has",
    "server.max_wal_size=7GB": "ALTER SYSTEM SET \"max_wal_size\" TO '7GB' on the target, run SELECT pg_reload_conf()",
    "server.block_size=4096": "and the target has 8192. Hint: leave it out",
    "server.work_mam=7MB": "the target has no setting work_mam",
    '"server.work_mem\'; DROP TABLE gone; --=7MB"': "the target has no setting work_mem'; DROP TABLE gone; --",
    "server.work_mem=lots": 'invalid value for parameter "work_mem": "lots"',
    "server.jit=on": "parapply sets it to off in its sessions",
    "server.enable_seqscan=on": "parapply sets it to off in its sessions",
}


def test_another_setting_of_the_server_is_refused_before_the_first_run(capture: Capture, target_db: Database) -> None:
    """Groups before it have not run then. A setting that is already so is no fault."""
    capture.go_on()
    others = ("--run", "apply.workers=2 server.block_size=8192")
    for group, message in _REFUSED.items():
        refused = replay(capture.folder, target_db, *others, "--run", group)
        assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr
    assert target_db.rows("SELECT count(*) FROM parapply_replay.runs") == [(0,)]
