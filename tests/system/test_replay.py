"""`parapply replay` with several groups: settings of the target's server, and the statements about each run."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.fixtures import warm
from tests.fixtures.captures import replay, write_mixed
from tests.fixtures.daemon import _environment as environment
from tests.fixtures.streams import FOLLOW, LITTLE_MEMORY, MANY_ROWS, fill

if TYPE_CHECKING:
    from pathlib import Path

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
#: Refuses to drop the table `evt`.
_KEEPING = """
CREATE FUNCTION parapply_replay.keep() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
    IF EXISTS (SELECT FROM pg_event_trigger_dropped_objects() WHERE object_name = 'evt') THEN
        RAISE 'evt is kept';
    END IF;
END $$;
CREATE EVENT TRIGGER keep ON sql_drop EXECUTE FUNCTION parapply_replay.keep();
ALTER EVENT TRIGGER keep ENABLE ALWAYS;
"""
#: Ends the command's own sessions, not the daemon's, with each row of the table `gone`.
_ENDING = """
CREATE FUNCTION parapply_replay.end() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM pg_terminate_backend(pid, 5000) FROM pg_stat_activity
     WHERE application_name = (SELECT 'parapply replay ' || slot_name FROM parapply.slots);
    RETURN NULL;
END $$;
CREATE FUNCTION parapply_replay.watch() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
    IF to_regclass('public.gone') IS NOT NULL AND NOT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'ending') THEN
        CREATE TRIGGER ending AFTER INSERT ON public.gone EXECUTE FUNCTION parapply_replay.end();
        ALTER TABLE public.gone ENABLE ALWAYS TRIGGER ending;
    END IF;
END $$;
CREATE EVENT TRIGGER watch ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION parapply_replay.watch();
ALTER EVENT TRIGGER watch ENABLE ALWAYS;
"""
#: Makes the third run wait for a lock before it has its tables.
_WAITING = """
CREATE FUNCTION parapply_replay.wait() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
    IF (SELECT count(*) = 2 FROM parapply_replay.runs WHERE is_done) THEN PERFORM pg_advisory_xact_lock(7); END IF;
END $$;
CREATE EVENT TRIGGER wait ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION parapply_replay.wait();
ALTER EVENT TRIGGER wait ENABLE ALWAYS;
"""
#: A value that is an option for work_mem unless it is quoted.
_PATH = r"$libdir:/a b\c' -c work_mem=9MB"


def _write(capture: Capture, n_transactions: int, first: int = 0) -> None:
    capture.go_on()
    capture.source.execute(
        f"DO $$ BEGIN FOR i IN 1..{n_transactions} LOOP INSERT INTO gone VALUES ({first} + i); COMMIT; END LOOP; END $$"
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
    assert [run["lost_parts"] for run in shown["runs"]] == [1, 0]
    assert target_db.rows(f"{query} ORDER BY 1") == [("5MB", "$libdir"), ("7MB", _PATH)]
    assert target_db.rows("SELECT count(*) >= 80 FROM parapply_replay.seen") == [(True,)]
    assert target_db.rows("SELECT * FROM pg_db_role_setting") == []
    with target_db.connect() as conn:
        assert conn.execute("SHOW work_mem").fetchone() == ("4MB",)


def test_the_time_of_a_part_that_was_not_written_down_is_missed(capture: Capture, target_db: Database) -> None:
    """A kill is seen by the next command, which says so; the loss of a session during the run costs nothing."""
    _write(capture, 20)
    options = ("--run", "apply.workers=1 apply.max_batch_transactions=5")
    killed = replay(capture.folder, target_db, *options, environ={"PARAPPLY_FAILPOINT": "committed:kill:3"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = replay(capture.folder, target_db, *options)
    assert (done.returncode, " and more" in done.stdout, "was killed, and took longer than" in done.stdout) == (
        0, True, True,
    ), done.stdout + done.stderr  # fmt: skip
    target_db.execute(_ENDING)
    whole = replay(capture.folder, target_db, *options, "--again", "--json")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    ((run,),) = target_db.rows("SELECT result FROM parapply_replay.runs")
    assert (run["is_done"], run.get("lost_parts")) == (True, 0)


def test_a_result_is_of_all_settings_and_of_the_rows_of_before(capture: Capture, target_db: Database) -> None:
    """Whatever a run depends on makes it another one, although its --run is the same; what it does not, does not.

    No delay holds it back: the capture ends before that is over.
    """
    _write(capture, 5)
    capture.source.execute("DELETE FROM gone")  # so that --copy-of finds none of them
    settings = [
        ("--set", "apply.delay_s=100"), ("--set", "conflict.insert_exists=skip"),
        ("--copy-of", capture.source.dsn), ("--copy-of", capture.source.dsn_with(dbname="postgres")),
    ]  # fmt: skip
    for number, more in enumerate([*settings, (*settings[-1], "--set", "log.level=warning")], 1):
        done = replay(capture.folder, target_db, "--run", "apply.workers=1", *more)
        assert done.returncode == 0, done.stdout + done.stderr
        n_done = min(number, len(settings))
        assert target_db.rows("SELECT count(*) FROM parapply_replay.runs WHERE is_done") == [(n_done,)]


def test_a_signal_between_two_runs_ends_the_command(capture: Capture, target_db: Database) -> None:
    """The daemon of the first one has ended, and its handlers of signals with it."""
    capture.go_on()
    assert replay(capture.folder, target_db).returncode == 0
    target_db.execute(_WAITING)
    words = ["replay", str(capture.folder), "--target", target_db.dsn, "--run", "apply.workers=2", "--run",
             "apply.workers=3"]  # fmt: skip
    with target_db.session("SELECT pg_advisory_lock(7)") as waited_for:
        waited_for.execute("SELECT pg_advisory_lock(7)")
        output, errors = [os.open(os.devnull, os.O_WRONLY) for _ in range(2)]
        process = warm.start(words, environment(None), (None, output, errors))
        try:
            target_db.wait_until("SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()
    assert target_db.rows("SELECT settings ~ '^apply.workers=2' FROM parapply_replay.runs WHERE is_done") == [
        (False,), (True,)
    ]  # fmt: skip


def test_a_transaction_that_never_finds_room_ends_a_run(capture: Capture, target_db: Database) -> None:
    """No publisher can send it whole, so that going on would never end; with more room the replay is done."""
    capture.go_on()
    capture.source.execute(fill("evt", 1, MANY_ROWS).decode())
    capture.go_on()
    settings = {**FOLLOW, **LITTLE_MEMORY, "apply.workers": 1, "source.reconnect_min_s": 0.01}
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    failed = replay(capture.folder, target_db, *options, "--set", f"apply.spill_limit_bytes={1 << 20}")
    assert (failed.returncode, "set a larger apply.spill_limit_bytes" in " ".join(failed.stdout.split())) == (1, True)
    assert replay(capture.folder, target_db, *options).returncode == 0
    assert target_db.rows("SELECT count(*) FROM evt") == [(MANY_ROWS,)]


def test_a_run_whose_tables_another_one_has_begun_to_drop_begins_again(capture: Capture, target_db: Database) -> None:
    """Its state is gone and its tables are not: to go on would give rows without a key twice."""
    capture.go_on()
    capture.source.execute("INSERT INTO evt VALUES (1, 'first')")
    _write(capture, 20)
    killing = {"PARAPPLY_FAILPOINT": "committed:kill:3"}
    options = ("--run", "apply.workers=1 apply.max_batch_transactions=5")
    killed = replay(capture.folder, target_db, *options, environ=killing)
    assert (killed.returncode, target_db.rows("SELECT count(*) FROM evt")) == (-signal.SIGKILL, [(1,)])
    target_db.execute(_KEEPING)
    other = replay(capture.folder, target_db, "--run", "apply.workers=2")
    assert (other.returncode, "evt is kept" in other.stderr) == (4, True), other.stderr
    target_db.execute("DROP EVENT TRIGGER keep")
    done = replay(capture.folder, target_db, *options)
    assert (done.returncode, target_db.rows("SELECT count(*) FROM evt")) == (0, [(1,)]), done.stdout + done.stderr


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


def test_each_run_has_the_reports_verdict_and_a_line(capture: Capture, target_db: Database, tmp_path: Path) -> None:
    """The limit is what the report says of the run's apply log. The log is kept where that is asked for."""
    _write(capture, 200)
    groups = ("--run", "apply.workers=1", "--run", "apply.workers=3 apply.max_batch_transactions=5")
    plot, logs = tmp_path / "day.svg", tmp_path / "logs"
    options = (*groups, "--set", f"applylog.directory={logs}", "--plot", str(plot))
    done = replay(capture.folder, target_db, *options, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    limits = [run["limit"] for run in json.loads(done.stdout)["runs"]]
    reported = []
    for number, log in enumerate(logs.iterdir()):
        report = warm.run(["report", str(log), "--out", str(tmp_path / f"{number}"), "--json"], environment(None), 100)
        reported += [said["words"] for said in json.loads(report.stdout)["verdicts"].values()]
    assert (sorted(limits), len(limits)) == (sorted(reported), 2)
    drawing = plot.read_text(encoding="utf-8")
    assert all(text in drawing for text in ("apply.workers=1", "apply.max_batch_transactions=5", 'id="run 1"'))
    shown = replay(capture.folder, target_db, *groups)
    assert all(limit[:40] in " ".join(shown.stdout.split()) for limit in limits), shown.stdout
    refused = replay(capture.folder, target_db, "--plot", str(tmp_path / "day.txt"))
    assert (refused.returncode, "name a file that ends in .svg or .png" in refused.stderr) == (2, True)


def test_a_log_that_is_not_kept_is_there_until_its_run_is_done(
    capture: Capture, target_db: Database, tmp_path: Path
) -> None:
    """Of a run that is killed it stays, so that the verdict is of the whole run; and nothing is left in the end."""
    _write(capture, 40)
    (tmp_path / "own").mkdir()
    environ = {"TMPDIR": str(tmp_path / "own")}
    groups = ("--run", "apply.workers=2 apply.max_batch_transactions=5")
    killing = {**environ, "PARAPPLY_FAILPOINT": "committed:kill:3"}
    killed = replay(capture.folder, target_db, *groups, environ=killing)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (folder,) = (tmp_path / "own").iterdir()
    ((token,),) = target_db.rows("SELECT result->>'log' FROM parapply_replay.runs")
    assert ([log.name for log in folder.iterdir()], folder.stat().st_mode & 0o777) == ([token], 0o700)
    folder.chmod(0o755)
    refused = replay(capture.folder, target_db, *groups, environ=environ)
    assert (refused.returncode, "may be another user's" in refused.stderr) == (2, True), refused.stderr
    folder.chmod(0o700)
    done = replay(capture.folder, target_db, *groups, "--json", environ=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of the time." in json.loads(done.stdout)["runs"][0]["limit"]
    assert list(folder.iterdir()) == []


def test_the_first_part_of_a_capture_predicts_all_of_it(capture: Capture, target_db: Database, tmp_path: Path) -> None:
    """Each group is predicted, also the one that ran; what is really replayed later is shown beside that."""
    for first in (0, 1500):
        _write(capture, 1500, first)
    groups = ("--run", "apply.workers=2", "--run", "apply.workers=4 target.synchronous_commit=off",
              "--set", "apply.max_batch_transactions=50")  # fmt: skip
    options = (*groups, "--predict", str(tmp_path / "log"), "--learn-changes", "1000", "--json")
    wrong = replay(capture.folder, target_db, *options, "--speed", "1")
    assert (wrong.returncode, "--learn-changes: give --predict" in wrong.stderr) == (2, True)
    killed = replay(capture.folder, target_db, *options, environ={"PARAPPLY_FAILPOINT": "committed:kill:1"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = replay(capture.folder, target_db, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)
    ((n_applied,),) = target_db.rows("SELECT count(*) FROM gone")
    assert 1000 <= n_applied < 3000
    assert (shown["learnt_from"]["settings"], shown["learnt_from"]["is_part"]) == ("apply.workers=2", True)
    assert shown["learnt_from"]["capture_changes"] == 3000
    assert [run["is_done"] for run in shown["runs"]] == [False, False]
    measured = json.loads(replay(capture.folder, target_db, *groups, "--json").stdout)
    assert measured["different_tables"] == []
    beside = json.loads(replay(capture.folder, target_db, *options).stdout)["runs"]
    for run, replayed, predicted in zip(beside, measured["runs"], shown["runs"], strict=True):
        assert {**run, "predicted": None} == {**replayed, "predicted": None}
        assert run["predicted"] == (one := predicted["predicted"])
        assert 0 < one["least_s"] <= one["seconds"] <= one["most_s"]
        # A queue is never longer than all of the work, and its minutes are the capture's.
        assert 0 < one["most_late_s"] <= one["seconds"] + 0.001
        assert [at for at, _ in one["late_by_minute"]] == [at for at, _ in replayed["late_by_minute"]]
    table = replay(capture.folder, target_db, *options[:-1]).stdout
    assert "predicted from the first part of the capture with apply.workers=2: all 3,000 changes" in table


def test_trials_of_a_part_show_errors_of_predictions(capture: Capture, target_db: Database, tmp_path: Path) -> None:
    """Other settings than any that is asked for, of half the capture; they are shown, and are no runs."""
    for first in (0, 2000):
        _write(capture, 2000, first)
    own = "apply.workers=2 apply.commit_order=preserve"
    groups = ("--run", own, "--run", "apply.workers=2 apply.commit_order=relaxed",
              "--run", f"{own} apply.max_batch_transactions=50")  # fmt: skip
    options = (*groups, "--predict", str(tmp_path / "log"))
    done = replay(capture.folder, target_db, *options, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    ((n_applied,),) = target_db.rows("SELECT count(*) FROM gone")
    assert 1000 <= n_applied <= 2000
    shown = json.loads(done.stdout)
    trials = shown["learnt_from"]["trials"]
    assert [(one["settings"], one["is_done"], one["seconds"] > 0) for one in trials] == [
        (f"{own} apply.max_batch_transactions=25", True, True),
        ("apply.workers=3 apply.commit_order=relaxed", True, True),
    ]
    assert [(run["is_done"], run["predicted"] is not None) for run in shown["runs"]] == [
        (True, False), (False, True), (False, True)
    ]  # fmt: skip
    # Trials that are done are not repeated.
    again = replay(capture.folder, target_db, *options).stdout
    assert f"a trial of its first part with {own} apply.max_batch_transactions=25 took" in again


def test_changes_are_counted_as_the_log_counts_them(capture: Capture, target_db: Database, tmp_path: Path) -> None:
    """Of transactions in progress, with parts that roll back, and of prepared ones."""
    capture.go_on()
    write_mixed(capture.source, 1)
    capture.go_on()
    log = tmp_path / "log"
    options = ("--run", "apply.workers=2", "--predict", str(log), "--learn-changes", "1000000", "--json")
    done = replay(capture.folder, target_db, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)
    lines = [line for path in log.glob("*/*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [counts for line in lines for counts in json.loads(line).get("rows", {}).values()]
    assert shown["learnt_from"]["capture_changes"] == sum([sum(counts.values()) for counts in rows])
    # The part is all of it, so the group is done, and nothing else is predicted.
    assert [(run["is_done"], run["predicted"]) for run in shown["runs"]] == [(True, None)]
