"""`parapply cutover` through a real PgBouncer: its clients get no error, wherever the command is killed or fails."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.fixtures.ends import REFUSED
from tests.fixtures.pgbouncer import APP, VIEWER, Clients, PgBouncer, pgbouncer
from tests.fixtures.roles import TARGET_ROLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fixtures.ends import Ends

pytestmark = [pytest.mark.pgbouncer, pytest.mark.timeout(400)]

#: Points at which clients may wait at the pooler, in the order in which the command passes them.
_HELD = (
    "cutover_pausing", "cutover_paused", "cutover_fencing", "cutover_draining", "cutover_comparing",
    "cutover_sequences", "cutover_stopping", "cutover_turning", "cutover_rewritten", "cutover_led_on",
    "cutover_opening", "cutover_resumed",
)  # fmt: skip


@pytest.fixture
def pooler(ends: Ends) -> Iterator[PgBouncer]:
    """A pooler that leads to the source."""
    with pgbouncer(ends.source) as one:
        yield one


def _words(*poolers: PgBouncer) -> list[str]:
    """Return the options that name poolers and their files."""
    named = [word for one in poolers for word in ("--pooler", one.console, "--pooler-config", str(one.ini))]
    # Far longer than the transactions of the tests, whose only end in time is `--pause-timeout 1`.
    return ["--pooler-database", APP, "--pause-timeout", "60", *named]


def test_there_and_back_without_an_error(ends: Ends, pooler: PgBouncer, capsys: pytest.CaptureFixture[str]) -> None:
    """About a hundred transactions a second through two poolers see no error, there and back; both sides are equal."""
    before = pooler.ini.read_bytes()
    with pgbouncer(ends.source) as other:
        words = _words(pooler, other)
        daemon = ends.start(ends.ahead)
        clients = Clients(pooler, other)
        clients.wait_for(60)
        looked = ends.run(*words, "--dry-run")
        assert (looked.returncode, looked.stderr) == (0, ""), looked
        assert f"2/9 fencing: PAUSE '{APP}' of the pooler at " in looked.stdout
        assert pooler.ini.read_bytes() == before

        with ends.held("cutover_led_on", *words) as there:
            clients.wait_held()
        assert there[0].returncode == 0, there
        assert daemon.exit_code() == 4
        clients.wait_for(60)
        assert {one.entry()["database"] for one in (pooler, other)} == {ends.target.dbname}
        follower = ends.start(ends.back)
        there_s = clients.longest_s

        with ends.held("cutover_led_on", *words, "--back") as back:
            clients.wait_held()
        assert back[0].returncode == 0, back
        assert follower.exit_code() == 4
        clients.wait_for(60)
        daemon = ends.start(ends.ahead)
        clients.end()
        daemon.wait_caught_up()
    assert clients.errors == []
    ends.check_equal(clients.acknowledged)
    assert pooler.entry()["database"] == ends.source.dbname
    with capsys.disabled():
        print(  # noqa: T201  the figures, for people
            f"\n{len(clients.acknowledged)} transactions, 0 errors; longest wait there {there_s:.3f} s,"
            f" in all {clients.longest_s:.3f} s (busy or not, no figure of a quiet machine)"
        )
    daemon.stop()


@pytest.mark.pg_majors(15)
def test_killed_at_each_point_clients_wait_and_see_no_error(ends: Ends, pooler: PgBouncer) -> None:
    """Killed at each point, there and back, the same command goes on; nothing is lost, nothing comes twice."""
    daemon = ends.start(ends.ahead)
    clients = Clients(pooler)
    clients.wait_for(20)
    options = [*_words(pooler), "--verify", "none"]
    for way, follows in (((), ends.back), (("--back",), ends.ahead)):
        for point in ("cutover_preparing", *_HELD, "cutover_ending", "cutover_done"):
            killed = ends.run(*options, *way, killed_at=point)
            assert killed.returncode == -9, (point, killed)
            if pooler.is_paused():
                clients.wait_held()
            if point == "cutover_draining":
                # The other direction names the command that goes on, and does not resume anything.
                assert ends.run(*options, *(() if way else ("--back",))).returncode == REFUSED["target"]
                assert pooler.is_paused()
        done = ends.run(*options, *way)
        assert (done.returncode, "nothing to do" in done.stdout) == (0, True), done
        clients.wait_for(20)
        daemon = ends.start(follows)
        clients.wait_for(20)
    clients.end()
    daemon.wait_caught_up()
    assert clients.errors == []
    ends.check_equal(clients.acknowledged)
    daemon.stop()


@pytest.mark.pg_majors(18)
def test_undone_at_each_point_the_pooler_leads_to_the_source_again(ends: Ends, pooler: PgBouncer) -> None:
    """Taken back from wherever it was killed: its clients go on there without an error, and its file is as before.

    `parapply status` names a pooler whose clients wait.
    """
    before = pooler.ini.read_bytes()
    daemon = ends.start(ends.ahead)
    clients = Clients(pooler)
    options = [*_words(pooler), "--verify", "none"]
    for point in (*_HELD[:2], "cutover_draining", "cutover_turning", *_HELD[8:10]):
        killed = ends.run(*options, killed_at=point)
        assert killed.returncode == -9, (point, killed)
        assert pooler.is_paused() == (point != "cutover_pausing")
        if pooler.is_paused():
            clients.wait_held()
        was_stopped = _HELD.index(point) >= _HELD.index("cutover_turning")
        if was_stopped:
            assert daemon.exit_code() == REFUSED["target"]
        assert ends.cutover()["paused"] == [f"{APP} at {pooler.console}"]
        unnamed = ends.run("--undo")
        assert (unnamed.returncode, "--leave-poolers goes on without it" in unnamed.stderr) == (2, True), unnamed
        undone = ends.run("--undo", *options)
        assert undone.returncode == 0, (point, undone)
        assert not pooler.is_paused()
        assert pooler.ini.read_bytes() == before
        assert pooler.entry()["database"] == ends.source.dbname
        clients.wait_for(10)
        ends.check_nothing_left()
        if was_stopped:
            daemon = ends.start(ends.ahead)
    assert ends.run(*options, killed_at="cutover_draining").returncode == -9
    left = ends.run("--undo", "--leave-poolers")
    assert (left.returncode, "is left as it is, perhaps paused" in left.stdout) == (0, True), left
    assert pooler.is_paused()
    clients.wait_held()
    pooler.ask(f'RESUME "{APP}"')
    clients.wait_for(10)
    clients.end()
    assert clients.errors == []
    daemon.wait_caught_up()
    ends.check_equal(clients.acknowledged)


@pytest.mark.pg_majors(18)
def test_a_client_that_connects_while_it_is_paused_is_served_at_once(ends: Ends) -> None:
    """PgBouncer breaks off its login at the target and counts that as failed; none waits for server_login_retry."""
    ends.start(ends.ahead)
    with pgbouncer(ends.source, "server_login_retry = 3600.5\n") as pooler:
        with ends.held("cutover_led_on", *_words(pooler), "--verify", "none") as done:
            comes = threading.Thread(target=_insert, args=(pooler,))
            comes.start()
            pooler.wait_for_waiting(1)
        assert done[0].returncode == 0, done
        comes.join(60)
        assert ends.target.rows("SELECT n FROM evt") == [(1,)]
        (retry,) = [row["value"] for row in pooler.ask("SHOW CONFIG") if row["key"] == "server_login_retry"]
        assert float(retry) == 3600.5


def _insert(pooler: PgBouncer) -> None:
    with pooler.connect() as client:
        client.execute("INSERT INTO evt VALUES (1)")


@pytest.mark.pg_majors(18)
def test_a_transaction_that_does_not_end_undoes_it(ends: Ends, pooler: PgBouncer) -> None:
    """PAUSE waits for each transaction; at its limit all go on, and the long one is not ended. Sessions stay."""
    ends.start(ends.ahead)
    clients = Clients(pooler)
    with pooler.connect() as long, long.transaction():
        long.execute("INSERT INTO evt VALUES (0)")
        done = ends.run(*_words(pooler), "--pause-timeout", "1")
        assert done.returncode == 1, done
        assert "have not all ended their transactions within 1 s" in done.stderr
        assert "everything was taken back" in done.stdout
        assert "fencing" not in done.stdout
        clients.wait_for(20)
        assert not pooler.is_paused()
        long.execute("INSERT INTO evt VALUES (0)")
    ends.check_nothing_left()
    clients.end()
    assert clients.errors == []


@pytest.mark.pg_majors(18)
def test_a_failure_after_the_stop_is_taken_back_because_clients_wait(ends: Ends, pooler: PgBouncer) -> None:
    """A pooler that cannot be led to the target stays with the source, and its clients go on there."""
    ends.start(ends.ahead)
    clients = Clients(pooler)
    clients.wait_for(10)
    options = [*_words(pooler), "--verify", "none"]
    assert ends.run(*options, killed_at="cutover_stopping").returncode == -9
    clients.wait_held()
    # It stops to read at its first line.
    pooler.ini.write_text("wrong\n" + pooler.ini.read_text())
    failed = ends.run(*options)
    assert failed.returncode == 1, failed
    assert "RELOAD" in failed.stderr or " still, after " in failed.stderr
    assert "everything was taken back: the source takes writes as before; start the daemon" in failed.stdout
    clients.wait_for(10)
    ends.check_nothing_left()
    clients.end()
    assert clients.errors == []


@pytest.mark.pg_majors(18)
def test_a_pooler_that_cannot_be_held_is_refused_before_anything_is_made(
    ends: Ends, pooler: PgBouncer, tmp_path: Path
) -> None:
    """Each refusal names the pooler and the remedy; a pooler by session is a warning."""
    ends.start(ends.ahead)
    elsewhere = tmp_path / "elsewhere.ini"
    text = pooler.ini.read_text()
    elsewhere.write_text(text.replace("dbname=", "dbname=x"))
    none = tmp_path / "none.ini"
    none.write_text("[databases]\nother = host=a\n")
    viewer = pooler.console.replace("user=admin", f"user={VIEWER}")
    assert viewer != pooler.console
    console, name = ("--pooler", pooler.console), ("--pooler-database", APP)
    for words, line in (
        ((*console, "--pooler-database", "no"), "no database 'no' of the pooler at "),
        (("--pooler", viewer, *name, "--pooler-config", str(pooler.ini)), "admin access needed"),
        (("--pooler", "host=127.0.0.1 port=1", *name), "is not reached: connection"),
        ((*console, *name), "nothing leads 'the-shop' of the pooler at "),
        ((*console, *name, "--pooler-config", str(elsewhere)), f"{elsewhere} leads 'the-shop' to x"),
        ((*console, *name, "--pooler-config", str(none)), "has 0 lines for the database 'the-shop'"),
        (("--pooler-config", str(none)), "pooler_files is without poolers"),
    ):
        refused = ends.run(*words)
        assert refused.returncode in {1, 2}, (words, refused)
        assert line in refused.stderr, (words, refused)
    pooler.ask(f'PAUSE "{APP}"')
    paused = ends.run(*_words(pooler))
    assert "is paused, and not by this cut-over" in paused.stderr
    pooler.ask(f'RESUME "{APP}"')
    pooler.ini.write_text(text.replace("pool_size=4", "pool_size=4 pool_mode=session"))
    pooler.ask("RELOAD")
    looked = ends.run(*_words(pooler), "--dry-run")
    assert looked.returncode == 0, looked
    assert "is pooled by session" in looked.stdout
    ends.check_nothing_left()


@pytest.mark.pg_majors(18)
def test_a_pooler_that_was_restarted_is_paused_again_or_not_taken_back(ends: Ends, pooler: PgBouncer) -> None:
    """One that leads to the target and is not paused lets clients write there: that cannot be undone."""
    ends.start(ends.ahead)
    options = [*_words(pooler), "--verify", "none"]
    assert ends.run(*options, killed_at="cutover_led_on").returncode == -9
    pooler.restart()
    assert not pooler.is_paused()
    with pooler.connect() as client:
        client.execute("INSERT INTO evt VALUES (1)")
    refused = ends.run("--undo", *options)
    assert refused.returncode == REFUSED["target"], refused
    assert "leads to the target and is not paused" in refused.stderr
    assert ends.run(*options).returncode == 0
    follower = ends.start(ends.back)
    follower.wait_caught_up()
    assert ends.source.rows("SELECT n FROM evt") == [(1,)]


class _Commands:
    """The operator's commands: each appends its place to a file."""

    def __init__(self, tmp_path: Path) -> None:
        self.said = tmp_path / "said"
        self.path = tmp_path / "commands.toml"

    def write(self, **commands: str) -> tuple[str, ...]:
        """Write the file, a line of shell for each place, and return the options that name it."""
        log = f'echo "$PARAPPLY_UNDO $PARAPPLY_WHEN $PARAPPLY_STEP $PARAPPLY_DIRECTION" >> {self.said}; '
        lines = ["[cutover.commands]"]
        lines += [f"{place} = {json.dumps(['/bin/sh', '-c', log + text])}" for place, text in commands.items()]
        self.path.write_text("\n".join(lines) + "\n")
        return "--config", str(self.path)

    def taken(self) -> list[str]:
        """Return what was said, and forget it."""
        lines = self.said.read_text().splitlines() if self.said.exists() else []
        self.said.unlink(missing_ok=True)
        return lines


@pytest.mark.pg_majors(18)
def test_commands_run_in_their_order_and_are_taken_back_in_the_reverse_one(ends: Ends, tmp_path: Path) -> None:
    """One that fails stops the cut-over; those that ran are taken back, and its output is shown without what acts.

    They get no password. The daemon that was stopped may have seen that before all is taken back, or not.
    """
    ends.start(ends.ahead)
    commands = _Commands(tmp_path)
    show = 'printf "%s\\n" "$PARAPPLY_OLD_DSN"; printf "a\\033[31mb\\n" >&2'
    options = commands.write(
        before_preparing="true", undo_before_preparing="true", before_fencing=show, undo_before_fencing="true",
        after_fencing="true", before_opening="exit 7", undo_before_opening="true",
    )  # fmt: skip
    secret = ends.ahead.source_dsn or ""
    failed = ends.run(*options, "--verify", "none", "--source", f"{secret} password=geheim")
    assert failed.returncode == 1, failed
    assert "command before_opening: it ended with exit code 7" in failed.stderr
    assert "command after_fencing is not taken back: undo_after_fencing is missing" in failed.stdout
    assert "before_fencing: a\\x1b[31mb\n" in failed.stdout
    assert "geheim" not in failed.stdout + failed.stderr
    assert "everything was taken back" in failed.stdout
    places = ["before preparing", "before fencing", "after fencing", "before opening"]
    undone = ["before opening", "before fencing", "before preparing"]
    assert commands.taken() == [*(f"0 {one} there" for one in places), *(f"1 {one} there" for one in undone)]
    ends.check_nothing_left()


@pytest.mark.pg_majors(18)
def test_a_command_that_is_not_taken_back_stays_noted(ends: Ends, tmp_path: Path) -> None:
    """The fence is lifted in any case, and `--undo` tries it again. One that takes too long has failed."""
    ends.start(ends.ahead)
    commands = _Commands(tmp_path)
    options = commands.write(before_fencing="true", undo_before_fencing="exit 3", before_draining="exit 5")
    failed = ends.run(*options, "--verify", "none")
    assert "command before_draining: it ended with exit code 5" in failed.stderr
    assert "command undo_before_fencing: it ended with exit code 3" in failed.stderr
    assert "the same command with --undo takes it back" in failed.stderr
    with ends.source.connect(user=TARGET_ROLE) as session:
        session.execute("INSERT INTO evt VALUES (1)")
    commands.taken()
    options = commands.write(before_fencing="true", undo_before_fencing="true")
    assert ends.run(*options, "--undo").returncode == 0
    assert commands.taken() == ["1 before fencing there"]
    ends.check_nothing_left()

    slow = ends.run(
        *commands.write(before_draining="sleep 60"), "--set", "cutover.command_timeout_s=1", "--verify", "none"
    )
    assert "command before_draining: it has not ended after 1 s" in slow.stderr
    assert "everything was taken back" in slow.stdout
    ends.check_nothing_left()


@pytest.mark.pg_majors(18)
def test_a_killed_cut_over_runs_each_command_at_least_once(ends: Ends, pooler: PgBouncer, tmp_path: Path) -> None:
    """A command whose end is not known runs again, and that is said; one that has ended does not. None is skipped.

    Here a command leads the pooler to the target, in a file that is not ours to write.
    """
    daemon = ends.start(ends.ahead)
    clients = Clients(pooler)
    clients.wait_for(10)
    commands = _Commands(tmp_path)
    target = psycopg.conninfo.conninfo_to_dict(ends.target.dsn)
    place = f"port={target['port']} dbname={target['dbname']}"
    lead = f"sed -i 's/port=.* pool_size/{place} pool_size/' {pooler.ini}"
    options = [
        *commands.write(before_fencing="true", before_turning=lead, after_opening="true", after_ending="true"),
        "--pooler", pooler.console, "--pooler-database", APP, "--verify", "none",
    ]  # fmt: skip
    for point in ("cutover_hook_begun", "cutover_hook_ended"):
        assert ends.run(*options, killed_at=point).returncode == -9
    assert commands.taken() == ["0 before fencing there"]
    again = ends.run(*options, killed_at="cutover_opening")
    assert "command before_fencing was begun before, and its end is not known: it runs again" in again.stdout
    assert commands.taken() == ["0 before fencing there", "0 before turning there"]
    clients.wait_held()
    assert ends.run(*options, killed_at="cutover_ending").returncode == -9
    done = ends.run(*options)
    assert done.returncode == 0, done
    assert commands.taken() == ["0 after opening there", "0 after ending there"]
    assert daemon.exit_code() == 4
    clients.wait_for(20)
    follower = ends.start(ends.back)
    clients.end()
    follower.wait_caught_up()
    assert clients.errors == []
    ends.check_equal(clients.acknowledged)
    follower.stop()
