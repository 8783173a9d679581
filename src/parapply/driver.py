"""psycopg's connection, made safe to give up while it is being opened, and remedies where a server refuses one.

Also the quick way through it for a statement that is run often.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import psycopg
from psycopg import generators, pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from parapply.login import PasswordUnknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from psycopg import sql
    from psycopg.abc import RV, PQGen
    from psycopg.pq.abc import PGresult

    from parapply.login import PasswordCommand

# psycopg warns of what it then raises, and we report what we catch: once is enough.
logging.getLogger("psycopg").setLevel(logging.ERROR)

#: Words of a refusal, and a remedy for the operator; a refused connection has no SQLSTATE. Servers that speak another
#: language get no hint.
_REFUSALS: Final = (
    ("is not permitted to log in", "ALTER ROLE ... LOGIN"),
    ("permission denied for database", "GRANT CONNECT ON DATABASE ... TO the role"),
    ("permission denied to start WAL sender", "the source's role needs REPLICATION: ALTER ROLE ... REPLICATION"),
    ("must be superuser or replication role", "the source's role needs REPLICATION: ALTER ROLE ... REPLICATION"),
    ("no pg_hba.conf entry", "add a line for role, database, address and encryption to the server's pg_hba.conf"),
    ("pg_hba.conf rejects", "add a line for role, database, address and encryption to the server's pg_hba.conf"),
    ("password authentication failed", "correct the password in the DSN, its file or ~/.pgpass, or password_command"),
    (
        "no password supplied",
        "give the password in the DSN, the file of PARAPPLY_..._DSN_FILE or ~/.pgpass, or password_command",
    ),
    ("certificate verify failed", "sslrootcert must name the authority that signed the server's certificate"),
    ("does not match host name", "connect by the name that is in the server's certificate"),
    ("server does not support SSL", "ssl = on on the server; sslmode=disable only on a network that is yours"),
    ("valid client certificate", "sslcert and sslkey must name a certificate that the server's ssl_ca_file trusts"),
    (
        "certificate authentication failed",
        "the certificate's common name must be the role's, or mapped in pg_ident.conf",
    ),
    ("authentication failed for user", "the server's log says why"),
    ("unsupported startup parameter", "connect to the server itself, not to a pooler"),
    ("configuration parameter", "correct options in the DSN"),
)
_MISSING: Final = (
    (re.compile(r'database ".*" does not exist'), "correct dbname in the DSN, or make the database"),
    (re.compile(r'role ".*" does not exist'), "correct user in the DSN, or make the role"),
)


def refusal_hint(text: str) -> str:
    """Return the remedy if a server refuses a connection with such a text; empty if it is not known."""
    missing = next((hint for words, hint in _MISSING if words.search(text)), "")
    return missing or next((hint for words, hint in _REFUSALS if words in text), "")


#: Words of libpq where no server was reached, or none that has room, and a remedy for the operator. The daemon goes on
#: trying, because each of these states may pass.
_UNREACHED: Final = (
    ("Connection refused", "start the server there, or correct host and port of the DSN; see its listen_addresses"),
    ("could not translate host name", "correct the host of the DSN"),
    ("failed to resolve host", "correct the host of the DSN"),
    ("too many clients already", "end sessions there, or raise max_connections"),
    ("remaining connection slots are reserved", "end sessions there, or raise max_connections"),
)


def lost_hint(error: psycopg.Error, text: str) -> str:
    """Return the remedy if a session could not be opened, or has ended, with such an error; empty if not known."""
    if isinstance(error, PasswordUnknown):
        return (
            "run the command by hand, as parapply's user: it must print the password in its first line, and end with 0"
        )
    return refusal_hint(text) or next((hint for words, hint in _UNREACHED if words in text), "")


#: Prefix that psycopg puts before libpq's words when libpq gave up before it sent anything over a network.
_NOT_BEGUN: Final = "connection is bad: "


def condition(sqlstate: str) -> str:
    """Return the name of an SQLSTATE like unique_violation; the server's own message may hold values."""
    try:
        name = psycopg.errors.lookup(sqlstate).__name__
    except KeyError:
        return "error"
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


#: Classes of errors whose message names objects and holds no value: connections, features, dependent objects, schemas,
#: retries, syntax and access rules, resources, objects in use, operators.
NAMING: Final = frozenset({"08", "0A", "2B", "3F", "40", "42", "53", "55", "57"})


@contextmanager
def values_hidden(*, when: bool) -> Iterator[None]:
    """Raise errors of the server again by the names of their conditions, where their messages may hold values."""
    try:
        yield
    except psycopg.Error as error:
        state = error.sqlstate or ""
        if not (when and state) or state[:2] in NAMING:
            raise
        raise type(error)(f"{condition(state)} ({state})") from None


def dsn_problem(error: psycopg.Error) -> str:
    """Return why libpq refuses a connection string, before it tries any server; empty for every other error.

    A name that cannot be resolved or a missing socket is no such problem, because the server may come back.
    """
    if error.sqlstate or not isinstance(error, psycopg.OperationalError):
        return ""
    text = (str(error).splitlines() or [""])[0]
    if text.startswith("could not match"):
        return text  # psycopg itself, of hosts and ports
    # Also where it prepares the socket of a server: "connection to server ... failed: invalid integer value ...".
    is_refused = "connection to server" not in text or "for connection option" in text
    return text.removeprefix(_NOT_BEGUN) if text.startswith(_NOT_BEGUN) and is_refused else ""


#: A parameter that libpq looks at after it has read the service's file, and before it reaches for any server.
_PROBE: Final = "gssencmode"


def parameters_of(dsn: str) -> dict[str, Any]:
    """Return the parameters of a DSN, and of the service that it, or PGSERVICE, names.

    Parameters that we add to a DSN win over its service; and psycopg, which tries several hosts one after the other,
    knows only the hosts in the DSN.

    Raises:
        psycopg.ProgrammingError: the DSN cannot be parsed.
    """
    found: dict[str, Any] = conninfo_to_dict(dsn)
    if "service" not in found and not os.environ.get("PGSERVICE"):
        return found
    probe = pq.PGconn.connect_start(make_conninfo(dsn, **{_PROBE: "none"}).encode())
    if _PROBE.encode() not in probe.error_message:
        return found  # no such service: the attempt to connect says so
    options = {option.keyword.decode(): option.val.decode() for option in probe.info if option.val}
    del options[_PROBE]
    return {**options, **found}


#: Seconds: psycopg wakes up ten times a second while it waits for a server. A session that listens for calls would so
#: be a third of what an idle daemon does. Not longer: psycopg registers its socket again each time, so whatever takes
#: the registration away, as a closed socket of the same number may, costs a second at most.
_SELDOM_S: Final = 1.0
#: Least number of wakes in a wait with a limit, as a wait for calls has: no call is later than that part of it.
_WAKES: Final = 3


class Session(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A connection to either end; rows are tuples."""

    #: Since when it waits for an answer, by the monotonic clock; 0.0: it does not.
    waits_since_s = 0.0

    @classmethod
    async def connect(  # type: ignore[override]  # no parameter of libpq is named `command`
        cls,
        conninfo: str = "",
        *,
        command: PasswordCommand | None = None,
        **options: Any,  # noqa: ANN401  psycopg's
    ) -> Self:
        """Open a connection; the other arguments and errors are psycopg's.

        Args:
            conninfo: where to.
            command: prints the password, and is run again once where the server does not take it, because the token
                may have ended just now.
            options: psycopg's.

        Raises:
            PasswordUnknown: the command has printed none.
        """
        if command is None:
            return await cls._open(conninfo, **options)
        password = await command.password()
        try:
            return await cls._open(conninfo, **options, password=password)
        except psycopg.OperationalError as error:
            # Not by the server's words, which differ with its language and method: "PAM authentication failed" ...
            if error.pgconn is None or not error.pgconn.used_password:
                raise
            newer = await command.password(refused=password)
            if newer == password:
                raise
        return await cls._open(conninfo, **options, password=newer)

    @classmethod
    async def _open(cls, conninfo: str, **options: Any) -> Self:  # noqa: ANN401  psycopg's
        """Open a connection; arguments and errors are psycopg's.

        One that is cancelled while the server answers is closed: psycopg keeps it in a local variable, which lives as
        long as the exception does, and the server would keep its process as long.
        """
        try:
            return await super().connect(conninfo, **options)
        except asyncio.CancelledError as cancelled:
            traceback.clear_frames(cancelled.__traceback__)
            raise

    async def wait(self, gen: PQGen[RV], interval: float = 0.0, *more: Any, **named: Any) -> RV:  # noqa: ANN401
        """Wait for the server; arguments and errors are psycopg's, and 3.3.0 has fewer of them than later versions."""
        self.waits_since_s = time.monotonic()
        try:
            interval = interval or max(_SELDOM_S, (named.get("timeout") or 0.0) / _WAKES)
            return await super().wait(gen, interval, *more, **named)
        finally:
            self.waits_since_s = 0.0


#: Statements that `run_prepared` has prepared, by session.
_prepared: WeakKeyDictionary[psycopg.AsyncConnection[Any], set[bytes]] = WeakKeyDictionary()


async def run_prepared(
    conn: psycopg.AsyncConnection[Any], name: bytes, query: sql.Composed, params: Sequence[bytes | None]
) -> int:
    """Run a statement of one name that is run often, and return the number of rows that it returns.

    Past psycopg's cursors, which take the leader twice as long as this. Parameters are texts; None is NULL. Raise
    psycopg.Error if the connection broke, or the server refuses.
    """
    names = _prepared.setdefault(conn, set())
    async with conn.lock:
        if name not in names:
            conn.pgconn.send_prepare(name, query.as_bytes(conn))
            _check(await conn.wait(generators.execute(conn.pgconn)))
            names.add(name)
        conn.pgconn.send_query_prepared(name, params)
        return _check(await conn.wait(generators.execute(conn.pgconn)))


def _check(results: Sequence[PGresult]) -> int:
    """Return the rows of the only result; raise psycopg.Error if it is an error."""
    (result,) = results
    if result.status not in {pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK}:
        raise psycopg.errors.error_from_result(result)
    return result.ntuples
