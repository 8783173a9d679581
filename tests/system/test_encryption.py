"""TLS and SCRAM to both ends: the same stream as in the clear, and one clear error where one of them is wrong."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import pytest
from psycopg.conninfo import conninfo_to_dict

from parapply.copy import schema as schemas
from parapply.demo.server import PgServer
from parapply.login import Login
from parapply.source import slot
from tests.fixtures.certificates import Authority, major_with_tls
from tests.fixtures.daemon import error_of
from tests.fixtures.databases import create_database
from tests.fixtures.fan import make_slot
from tests.fixtures.plain import FAST, check_equal
from tests.fixtures.roles import SOURCE_ROLE, TARGET_ROLE
from tests.fixtures.route import Route
from tests.fixtures.selection import SELECTION
from tests.fixtures.streams import stream_everything

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.daemon import RunCommand, StartDaemon
    from tests.fixtures.servers import ServerPool

pytestmark = pytest.mark.tls

_PASSWORD = "correct horse 'battery' \\ staple"
_ROLES = {"source": SOURCE_ROLE, "target": TARGET_ROLE}
_CODES = {"source": 3, "target": 4}
#: Behind the superuser's own line: encrypted with a password or, for one database, with a certificate.
_HBA = """
host all postgres 127.0.0.1/32 trust
hostssl certified all 127.0.0.1/32 cert
hostssl all all 127.0.0.1/32 scram-sha-256
"""
_TABLES = "CREATE TABLE item (id int PRIMARY KEY, v text); CREATE TABLE evt (n int, v text);"
_IS_ENCRYPTED = (
    "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = '{}' AND datname = '{}'"
)


@dataclass(frozen=True)
class _Site:
    """A server with TLS that has both ends.

    Attributes:
        route: by the superuser, in the clear: for tests only.
        authority: signed the certificates of the server and of the clients.
        directory: for the tests' files.
    """

    route: Route
    authority: Authority
    directory: Path

    def dsn(self, end: str, **more: str) -> str:
        """Return the right connection string of the daemon's role, without its password, with other parts."""
        database = self.route.source if end == "source" else self.route.target
        right = {"host": "localhost", "hostaddr": "127.0.0.1", "sslmode": "verify-full", "channel_binding": "require",
                 "sslrootcert": str(self.authority.certificate)}  # fmt: skip
        return database.dsn_with(**{"user": _ROLES[end], **right, **more})

    def passwords(self, password: str = _PASSWORD) -> dict[str, str]:
        """Return the variable that names a file with the passwords."""
        path = self.directory / f"pgpass-{secrets.token_hex(4)}"
        escaped = re.sub(r"([\\:])", r"\\\1", password)
        path.write_text(f"*:*:*:*:{escaped}\n", encoding="utf-8")
        path.chmod(0o600)
        return {"PGPASSFILE": str(path)}


def _install(server: PgServer, authority: Authority) -> None:
    """Give a server its certificate and rules, and restart it."""
    certificate, key = authority.issue("localhost", hosts="DNS:localhost")
    owner = server.data_dir.stat()
    for path, name in ((certificate, "server.crt"), (key, "server.key"), (authority.certificate, "ca.crt")):
        place = server.data_dir / name
        place.write_bytes(path.read_bytes())
        place.chmod(0o600)
        os.chown(place, owner.st_uid, owner.st_gid)
    (server.data_dir / "pg_hba.conf").write_text(_HBA, encoding="utf-8")
    server.configure({"ssl": "on", "ssl_ca_file": "ca.crt", "password_encryption": "scram-sha-256"})
    server.restart()


@pytest.fixture(scope="module")
def site(
    server_pool: ServerPool, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Site]:
    """Both ends on one server with TLS, and the slot."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = Authority(directory / "right")
    major = major_with_tls(pytestconfig.stash[SELECTION].binaries)
    assert major
    server = server_pool.new("tls", major)
    try:
        _install(server, authority)
        source, target = create_database(server, "source"), create_database(server, "certified")
        create_database(server, "plain")
        for role in _ROLES.values():
            server.execute(f"ALTER ROLE {role} PASSWORD '{_PASSWORD.replace(chr(39), chr(39) * 2)}'")
        for database in (source, target):
            database.execute(_TABLES)
        source.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        stream_everything(source)
        route = Route(source=source, target=target, settings=FAST, source_dsn=source.dsn, target_dsn=target.dsn)
        make_slot(route)
        yield _Site(route, authority, directory)
    finally:
        server.cleanup()


def _client(site: _Site, name: str) -> dict[str, str]:
    certificate, key = site.authority.issue(name)
    return {"sslcert": str(certificate), "sslkey": str(key)}


def _encrypted(site: _Site) -> Route:
    """The source by SCRAM bound to the channel, the target by a certificate of the client."""
    by_certificate = site.dsn("target", channel_binding="prefer", **_client(site, TARGET_ROLE))
    return replace(site.route, source_dsn=site.dsn("source"), target_dsn=by_certificate)


def test_an_encrypted_stream_is_the_same_stream(site: _Site, start_daemon: StartDaemon) -> None:
    """Verified and encrypted on both ends, small, large and streamed transactions arrive equal; no password is seen."""
    environ = site.passwords()
    daemon = start_daemon(_encrypted(site), environ=environ, is_cold=True)
    daemon.wait_for_event("source_connected")
    source = site.route.source
    source.execute("INSERT INTO item SELECT g, repeat(md5(g::text), g % 70) FROM generate_series(1, 3000) AS g")
    source.execute("DO $$ BEGIN FOR i IN 1..500 LOOP INSERT INTO evt VALUES (i, 'v'); COMMIT; END LOOP; END $$")
    source.execute("UPDATE item SET v = v || 'é' WHERE id % 3 = 0; DELETE FROM item WHERE id % 7 = 0")
    daemon.wait_caught_up()
    for end, database in (("source", source), ("target", site.route.target)):
        assert database.rows(_IS_ENCRYPTED.format(_ROLES[end], database.dbname)) == [(True,)]
    command_line = Path(f"/proc/{daemon.pid}/cmdline").read_bytes()
    daemon.stop()
    check_equal(site.route, "item", "evt")
    assert _PASSWORD.encode() not in command_line
    assert _PASSWORD not in "\n".join(daemon.lines)
    assert not daemon.events_of("source_lost")


def test_a_stream_that_is_cut_comes_again(site: _Site, start_daemon: StartDaemon) -> None:
    """An encrypted session that is ended is opened again, and nothing is lost."""
    daemon = start_daemon(_encrypted(site), environ=site.passwords())
    daemon.wait_for_event("source_connected")
    site.route.source.execute("INSERT INTO evt SELECT g, 'before' FROM generate_series(1, 200) AS g")
    query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename IN ('{}', '{}')"
    site.route.source.execute(query.format(*_ROLES.values()))
    site.route.source.execute("INSERT INTO evt SELECT g, 'after' FROM generate_series(1, 200) AS g")
    daemon.wait_for_event("source_connected", count=2)
    daemon.finish()
    check_equal(site.route, "item", "evt")


@pytest.mark.in_turn("end")
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"sslrootcert": "other"}, "certificate verify failed.*Hint: sslrootcert"),
        ({"host": "wrong.example"}, 'does not match host name "wrong.example".*Hint: connect by the name'),
        ({"sslmode": "disable", "channel_binding": "prefer"}, "no pg_hba.conf entry.*no encryption.*Hint: add a line"),
        ({"password": "wrong"}, "password authentication failed.*Hint: correct the password"),
        ({"dbname": "certified", "channel_binding": "prefer"}, "valid client certificate.*Hint: sslcert"),
        ({"dbname": "certified", "channel_binding": "prefer", "sslcert": "stranger"},
         "certificate authentication failed.*Hint: the certificate's common name"),
    ],
    ids=["authority", "name", "in the clear", "password", "no certificate", "another's certificate"],
)  # fmt: skip
@pytest.mark.parametrize("end", ["source", "target"])
def test_what_is_wrong_is_said(site: _Site, run_command: RunCommand, end: str, more: dict[str, str], says: str) -> None:
    """Each fault of TLS or SCRAM ends the command at once, with the end's code and one line that says what to do."""
    if more.get("sslrootcert"):
        more = {"sslrootcert": str(Authority(site.directory / secrets.token_hex(4)).certificate)}
    if more.get("sslcert"):
        more = {**more, **_client(site, "stranger")}
    databases = {"source": "source", "target": "plain"}
    dsns = {f"{one}_dsn": site.dsn(one, dbname=databases[one]) for one in _ROLES}
    dsns[f"{end}_dsn"] = site.dsn(end, **{"dbname": databases[end], **more})
    route = replace(site.route, source_dsn=dsns["source_dsn"], target_dsn=dsns["target_dsn"])
    done = run_command(route, "run", environ=site.passwords(), timeout_s=30)
    assert done.returncode == _CODES[end], done.stderr
    told = error_of(done.stderr.splitlines())
    assert re.search(says, told), told
    assert told.startswith(end)
    assert _PASSWORD not in done.stderr


def _uri(dsn: str) -> str:
    parts: dict[str, Any] = conninfo_to_dict(dsn)
    place = f"{parts.pop('user')}@{parts.pop('host')}:{parts.pop('port')}/{parts.pop('dbname')}"
    return f"postgresql://{place}?{urlencode(parts, quote_via=quote)}"


def _service(site: _Site, end: str, dsn: str) -> str:
    """Write a service into the file of all, and return a connection string that names it and nothing else."""
    lines = [f"{key}={value}" for key, value in conninfo_to_dict(dsn).items()]
    with (site.directory / "services").open("a", encoding="utf-8") as file:
        file.write("\n".join([f"[{end}]", *lines, "options=-c test.service=known", f"application_name={end} end", ""]))
    return f"service={end}"


@pytest.mark.parametrize("form", ["keywords", "uri", "hosts", "service"])
def test_a_connection_string_may_have_any_form(
    site: _Site,
    start_daemon: StartDaemon,
    run_command: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    """A daemon, commands and pg_dump take it alike, with certificates, several hosts and all settings of a service."""
    more = {"channel_binding": "prefer", "target_session_attrs": "read-write"}
    if form in {"hosts", "service"}:
        # The first does not answer.
        port = conninfo_to_dict(site.route.source.dsn)["port"]
        more = {**more, "host": "localhost,localhost", "hostaddr": "127.0.0.1,127.0.0.1", "port": f"1,{port}"}
    dsns = {"source": site.dsn("source", **more), "target": site.dsn("target", **more, **_client(site, TARGET_ROLE))}
    environ = site.passwords()
    if form == "uri":
        dsns = {end: _uri(dsn) for end, dsn in dsns.items()}
    if form == "service":
        dsns = {end: _service(site, end, dsn) for end, dsn in dsns.items()}
        environ["PGSERVICEFILE"] = str(site.directory / "services")
    route = replace(site.route, source_dsn=dsns["source"], target_dsn=dsns["target"])
    daemon = start_daemon(route, environ=environ)
    daemon.wait_for_event("source_connected")
    site.route.source.execute(f"INSERT INTO evt VALUES (1, '{form}')")
    daemon.wait_caught_up()
    name = "source end" if form == "service" else f"parapply {route.slot}"
    site.route.source.wait_until(
        f"SELECT count(*) > 0 FROM pg_stat_activity WHERE usename = '{SOURCE_ROLE}' AND application_name = '{name}'"
    )
    for command in ("status --json", "check", f"wait --lsn {route.end_of_source_lsn()}", "cutover --print-reverse"):
        done = run_command(route, command, environ=environ)
        assert done.returncode in ({0, 1} if command == "check" else {0}), done.stdout + done.stderr
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    server = site.route.source.server
    assert isinstance(server, PgServer)
    script = asyncio.run(schemas.dump(str(server.program("pg_dump")), Login(dsns["source"]), without=[]))
    assert b"CREATE TABLE public.evt" in script
    if form == "service":
        assert asyncio.run(_shown(dsns["source"])) == "known"
    daemon.stop()
    check_equal(site.route, "item", "evt")


async def _shown(dsn: str) -> str:
    """Return a setting that the options of a service set, in a session that sets options also."""
    async with await slot.connect(Login(dsn), application_name="test") as conn:
        row = await (await conn.execute("SHOW test.service")).fetchone()
    assert row is not None
    return str(row[0])
