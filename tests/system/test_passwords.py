"""`password_command`: passwords that end under a running daemon, and commands that print none; no secret is seen."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parapply.demo.binaries import find_binaries, find_program
from tests.fixtures.daemon import error_of
from tests.fixtures.databases import create_end, drop_database
from tests.fixtures.plain import FAST, TABLES, check_equal
from tests.fixtures.roles import SOURCE_ROLE, TARGET_ROLE
from tests.fixtures.route import Route
from tests.fixtures.selection import SELECTION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from parapply.demo.server import PgServer
    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.servers import ServerPool

_ROLES = {"source": SOURCE_ROLE, "target": TARGET_ROLE}
_CODES = {"source": 3, "target": 4}
_HBA = """
local all all trust
host all postgres 127.0.0.1/32 trust
host all all 127.0.0.1/32 scram-sha-256
"""
#: Gives the role $1 a password that it has never had, notes that in the file $2, and prints it.
_RENEWING = r"""#!/bin/sh -e
WORD="it's \"$1\" \\ é $(od -An -N8 -tx8 /dev/urandom | tr -d ' ')"
export WORD PGCLIENTENCODING=UTF8
printf '%s\n' "$WORD" >>"$2"
PSQL -qX -v ON_ERROR_STOP=1 -v role="$1" DSN <<'END'
\getenv word WORD
ALTER ROLE :"role" PASSWORD :'word';
END
printf '%s\nsecond line\n' "$WORD"
"""


@dataclass(frozen=True)
class _Site:
    """A server that has both ends and lets their roles in by password only.

    Attributes:
        server: of both.
        directory: for programs and files.
    """

    server: PgServer
    directory: Path

    def program(self, name: str, text: str) -> str:
        """Write a program and return a command with it."""
        path = self.directory / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return shlex.quote(str(path))

    def renewing(self) -> dict[str, str]:
        """Return settings by which each password is a new one."""
        program = shlex.quote(str(self.directory / "renew"))
        return {f"{end}.password_command": f"{program} {role} {self.issued(end)}" for end, role in _ROLES.items()}

    def issued(self, end: str) -> Path:
        """Return the file with the passwords that were given to the role of an end."""
        return self.directory / f"issued-{end}"

    def check_unseen(self, *texts: str) -> None:
        """Fail if there is a password in a text, or if none was given.

        Raises:
            AssertionError: so it is.
        """
        for end in _ROLES:
            words = self.issued(end).read_text(encoding="utf-8").splitlines()
            assert words
            # A part of it, because quotes and backslashes may be escaped where it is shown.
            assert not [text for text in texts for word in words if word.split()[-1] in text]


@pytest.fixture(scope="module")
def server(server_pool: ServerPool, pytestconfig: pytest.Config) -> Iterator[PgServer]:
    """The server of all tests here."""
    made = server_pool.new("passwords", max(pytestconfig.stash[SELECTION].binaries))
    try:
        (made.data_dir / "pg_hba.conf").write_text(_HBA, encoding="utf-8")
        made.restart()
        yield made
    finally:
        made.cleanup()


@pytest.fixture
def site(server: PgServer, tmp_path: Path) -> _Site:
    """The server, and the program that gives passwords."""
    found = _Site(server, tmp_path)
    psql, dsn = shlex.quote(str(server.program("psql"))), shlex.quote(server.dsn())
    found.program("renew", _RENEWING.replace("PSQL", psql).replace("DSN", dsn))
    return found


@pytest.fixture
def route(site: _Site) -> Iterator[Route]:
    """Two databases with tables and a publication on the source only, and no slot."""
    source, target = create_end(site.server, "source"), create_end(site.server, "target")
    source.execute(TABLES)
    source.execute("CREATE PUBLICATION pub FOR TABLE item, evt; INSERT INTO item VALUES (1, 0), (2, 0)")
    target.execute(f"GRANT CREATE ON SCHEMA public TO {TARGET_ROLE}")
    yield Route(source=source, target=target, settings=FAST)
    for database in (source, target):
        drop_database(database)


@pytest.fixture
def made(route: Route, new_slot: Callable[[Route], None]) -> Route:
    """The same with tables on both sides and a slot."""
    route.source.execute("TRUNCATE item")
    route.target.execute(TABLES)
    new_slot(replace(route, source_dsn=route.source.dsn, target_dsn=route.target.dsn))
    return route


def test_a_password_that_ends_under_the_daemon_harms_nothing(
    site: _Site, made: Route, start_daemon: StartDaemon
) -> None:
    """Each run of the command ends the password before it, and all sessions are ended in between: nothing is lost."""
    daemon = start_daemon(made, settings=site.renewing(), is_cold=True)
    daemon.wait_for_event("source_connected")
    for number in range(3):
        made.source.execute(f"INSERT INTO item SELECT g, {number} FROM generate_series({number}00, {number}99) AS g")
        connected = len(daemon.events_of("source_connected"))
        for role in (_ROLES["target"], _ROLES["source"]):
            made.source.execute(
                f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = '{role}'"
            )
        made.source.execute(f"INSERT INTO evt SELECT generate_series({number}00, {number}99)")
        daemon.wait_for_event("source_connected", count=connected + 1)
        daemon.wait_caught_up()
    command_line = Path(f"/proc/{daemon.pid}/cmdline").read_text(encoding="utf-8")
    daemon.stop()
    check_equal(made, "item", "evt")
    assert not [event for event in daemon.events if event["level"] == "error"]
    site.check_unseen(command_line, *daemon.lines)


def test_commands_ask_for_their_passwords(site: _Site, route: Route, run_command: RunCommand) -> None:
    """Copy, pg_dump, a daemon that ends and the commands that look: each gets one, and shows none."""
    pg_dump = find_program("pg_dump", find_binaries())
    seen = site.directory / "seen"
    wrapper = site.program(
        "pg_dump",
        f'#!/bin/sh\nprintf "%s\\n" "$*" >>{seen}\nprintenv PGPASSWORD >>{seen}.password\nexec {pg_dump} "$@"\n',
    )
    route = replace(route, settings={**route.settings, **site.renewing()})
    texts = []
    for command, *arguments in (
        ("check", "--copy", "--schema"),
        ("init", "--copy", "--schema", "--pg-dump", wrapper.strip("'"), "--connections", "2"),
        ("check",),
        ("run", "--until", route.end_of_source_lsn()),
        ("status", "--json"),
        ("wait", "--lsn", "0/1", "--timeout", "0"),
        ("cutover", "--print-reverse"),
        ("drop", "--yes"),
    ):
        done = run_command(route, command, *arguments)
        # Warnings of `check` are none of a password.
        assert done.returncode in ({0, 1} if command == "check" else {0}), done.stderr
        texts += [done.stdout, done.stderr]
        if command == "init":
            check_equal(route, "item", "evt")
        if command == "cutover":
            assert done.stdout.count("password_command = ") == 2
    site.check_unseen(*texts, seen.read_text())
    given = Path(f"{seen}.password").read_text(encoding="utf-8").splitlines()
    assert given
    assert set(given) <= set(site.issued("source").read_text(encoding="utf-8").splitlines())


@pytest.mark.in_turn("end")
@pytest.mark.parametrize("end", ["source", "target"])
def test_a_command_that_fails_is_tried_again(
    site: _Site, made: Route, run_command: RunCommand, start_daemon: StartDaemon, end: str
) -> None:
    """A command of parapply ends with the end's code and one line; the daemon goes on when the command prints one."""
    ready = site.directory / "ready"
    renew = site.renewing()
    words = "echo geheim; echo 'FATAL:  password authentication failed: vault is sealed' >&2; exit 5"
    program = site.program("fail", f'#!/bin/sh\n[ -e {ready} ] && exec "$@"\n{words}\n')
    settings = {**renew, f"{end}.password_command": f"{program} {renew[f'{end}.password_command']}"}
    refused = run_command(replace(made, settings=settings), "init")
    assert refused.returncode == _CODES[end], refused.stderr
    said = error_of(refused.stderr.splitlines())
    assert said.startswith(f"{end}, connecting: password_command ended with exit code 5: FATAL: password"), said
    assert "Hint: run the command by hand" in said
    daemon = start_daemon(made, settings=settings)
    lost = daemon.wait_for_event(f"{end}_lost", count=2)
    assert lost["level"] == "warning"
    assert "vault is sealed" in lost["error"]
    ready.touch()
    daemon.wait_for_event("source_connected")
    made.source.execute("INSERT INTO evt VALUES (1)")
    daemon.finish()
    check_equal(made, "evt")
    assert not [event for event in daemon.events if event["level"] == "error"]
    assert not [line for line in [refused.stderr, refused.stdout, *daemon.lines] if "geheim" in line]


@pytest.mark.in_turn("end")
@pytest.mark.parametrize("end", ["source", "target"])
def test_a_wrong_password_is_asked_for_twice(site: _Site, made: Route, run_command: RunCommand, end: str) -> None:
    """It may have ended just now, so the command is run once more; then it is an error like every wrong password."""
    runs = site.directory / "runs"
    program = site.program("wrong", f'#!/bin/sh\necho >>{runs}\necho "geheim $(wc -l <{runs})"\n')
    settings = {**made.settings, **site.renewing(), f"{end}.password_command": program}
    refused = run_command(replace(made, settings=settings), "run", timeout_s=60)
    assert refused.returncode == _CODES[end], refused.stderr
    said = error_of(refused.stderr.splitlines())
    assert "password authentication failed" in said
    assert "password_command" in said
    assert "geheim" not in refused.stderr
    assert runs.read_text() == "\n\n"
