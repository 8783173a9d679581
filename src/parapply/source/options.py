"""Requests to the publisher when the stream starts: pgoutput's options, the command, and session settings.

In: plain values. Out: SQL texts and a connection string. Reads a service of the DSN; must never open a connection.

Source: PostgreSQL manual, "Logical Streaming Replication Parameters", "Streaming Replication Protocol",
"String Functions and Operators" (quote_ident); PostgreSQL's `repl_scanner.l` for what the replication grammar quotes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from psycopg.conninfo import make_conninfo

from parapply.driver import parameters_of
from parapply.errors import ConfigError, SourceRefused
from parapply.model import format_lsn
from parapply.quoting import identifier, plain_literal

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Protocol 1 carries whole transactions, 2 streams, 3 prepared ones, 4 parallel streams. Options that are not asked
#: for, such as `binary` and `messages`, are off.
_PROTO_PLAIN, _PROTO_STREAMING, _PROTO_TWO_PHASE, _PROTO_PARALLEL = 1, 2, 3, 4

#: server_version_num of the first server whose pgoutput knows an option, or a value of it.
_ORIGIN_SINCE = 160000
_STREAMING_SINCE = 140000
_TWO_PHASE_SINCE = 150000
_PARALLEL_SINCE = 160000

_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")

#: Values travel as text, so the publisher's session must print what the target's session reads (trap T-44), and two
#: sessions must print one key alike (T-21), whatever ALTER ROLE or ALTER DATABASE say.
SESSION_SETTINGS: tuple[tuple[str, str], ...] = (
    ("DateStyle", "ISO, YMD"),
    ("IntervalStyle", "postgres"),
    ("TimeZone", "UTC"),
    ("extra_float_digits", "3"),
    ("bytea_output", "hex"),
    ("lc_monetary", "C"),
    # reg* values are printed with their schema, except pg_catalog's, and quoted only where they must be.
    ("search_path", "pg_catalog"),
    ("quote_all_identifiers", "off"),
    # Rows that a policy hides would be missing on the target after a copy, and not be compared: an error instead.
    ("row_security", "off"),
    ("standard_conforming_strings", "on"),
    # A question would wait for a safe snapshot as long as a serializable transaction writes.
    ("default_transaction_deferrable", "off"),
    ("default_transaction_isolation", "read committed"),
    ("default_transaction_read_only", "off"),
    ("statement_timeout", "0"),
    ("lock_timeout", "0"),
    ("idle_in_transaction_session_timeout", "0"),
    # A warning says that a publication was missing.
    ("client_min_messages", "warning"),
    # Questions to the catalogue look dear to the planner and take milliseconds; to compile one took a second.
    ("jit", "off"),
)

#: The same, by the server_version_num of the first server that knows each; one that does not refuses a connection.
_LATER_SETTINGS: tuple[tuple[int, str, str], ...] = (
    (140000, "idle_session_timeout", "0"),
    # A walsender decodes each transaction inside its own: a transaction that takes longer to send would never arrive.
    (170000, "transaction_timeout", "0"),
)


def streaming_of(server_version_num: int, wanted: str) -> str:
    """Return how transactions in progress are streamed: off, on or parallel; `auto` is the best that the server has.

    Raise SourceRefused if the publisher is too old for what is wanted.
    """
    best = "parallel" if server_version_num >= _PARALLEL_SINCE else "on"
    best = best if server_version_num >= _STREAMING_SINCE else "off"
    if wanted == "auto":
        return best
    if wanted == "parallel" and best != "parallel":
        raise SourceRefused(
            "source.streaming = 'parallel' needs a publisher of PostgreSQL 16 or later",
            hint="set source.streaming = 'auto', which takes the best that the publisher has",
        )
    return wanted


def start_options(
    server_version_num: int,
    publications: Sequence[str],
    origin: str,
    *,
    streaming: str = "off",
    two_phase: bool = False,
) -> tuple[tuple[str, str], ...]:
    """Return pgoutput's options as (name, value); values are not quoted yet.

    Args:
        server_version_num: of the publisher, for example 180004.
        publications: their names, as in pg_publication.
        origin: `any`, or `none` for changes that no subscriber wrote (16 and later).
        streaming: of `streaming_of`.
        two_phase: PREPARE comes when it happens (15 and later). The slot gets two_phase by that, for good.

    Raises:
        SourceRefused: the publisher is too old for an option.
        ConfigError: no publication, or a name that no publication can have.
    """
    version = {"off": _PROTO_PLAIN, "on": _PROTO_STREAMING, "parallel": _PROTO_PARALLEL}[streaming]
    version = max(version, _PROTO_TWO_PHASE) if two_phase else version
    options = [("proto_version", str(version)), ("publication_names", _identifier_list(publications))]
    if streaming != "off":
        options.append(("streaming", streaming))
    if two_phase:
        if server_version_num < _TWO_PHASE_SINCE:
            raise SourceRefused(
                "source.two_phase needs a publisher of PostgreSQL 15 or later", hint="set source.two_phase = false"
            )
        options.append(("two_phase", "on"))
    if origin != "any":
        if server_version_num < _ORIGIN_SINCE:
            raise SourceRefused(
                f"source.origin = {origin!r} needs a publisher of PostgreSQL 16 or later",
                hint="set source.origin = 'any', or do not replicate in a circle",
            )
        options.append(("origin", origin))
    return tuple(options)


def _identifier_list(names: Sequence[str]) -> str:
    """Return names as SplitIdentifierString reads them: unquoted ones would be folded to lower case."""
    if not names or not all(names) or any("\0" in name for name in names):
        raise ConfigError("source.publications: name at least one publication; a name is not empty and has no NUL")
    return ",".join(map(identifier, names))


def start_replication_sql(slot: str, start_lsn: int, options: Sequence[tuple[str, str]]) -> str:
    """Return the START_REPLICATION command.

    The replication grammar has no escapes but doubled quotes: a backslash stands for itself.

    Args:
        slot: name of the slot.
        start_lsn: the watermark; the publisher silently starts later if it was told more.
        options: of `start_options`.

    Raises:
        ConfigError: no slot can have this name.
    """
    check_slot_name(slot)
    pairs = ", ".join(f"{identifier(name)} {plain_literal(value)}" for name, value in options)
    return f"START_REPLICATION SLOT {identifier(slot)} LOGICAL {format_lsn(start_lsn)} ({pairs})"


def check_slot_name(slot: str) -> None:
    """Refuse what PostgreSQL takes for no name of a slot; what passes needs no escapes anywhere.

    Raises:
        ConfigError: no slot can have this name.
    """
    if not _SLOT_NAME.fullmatch(slot):
        raise ConfigError(
            f"source.slot: {slot!r} is not a slot name: lower case letters, digits and underscores, at most 63"
        )


def connection_options() -> str:
    """Return SESSION_SETTINGS as the `options` parameter of a connection, blanks escaped by a backslash."""
    return " ".join(f"-c {name}={_escaped(value)}" for name, value in SESSION_SETTINGS)


def later_settings_sql(server_version_num: int) -> str:
    """Return the statements that pin, on an open connection, what only some servers know; empty if there is nothing."""
    known = [f"SET {name} = {value}" for since, name, value in _LATER_SETTINGS if server_version_num >= since]
    return "; ".join(known)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


#: Parameters of every connection, unless the DSN says otherwise; seconds, and the number that go without an answer.
_KEEPALIVES = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}


def source_conninfo(
    dsn: str, *, application_name: str, is_replication: bool, connect_timeout_s: int, decoding_memory_bytes: int = 0
) -> str:
    """Return the connection string of a session on the publisher, with its settings pinned.

    A publisher that goes without a word is noticed in a minute, by keep-alives of TCP, because a session that waits for
    an answer has no other sign; the kernel alone takes two hours.

    Options of the user's own DSN come first, so that ours win. An application_name in the DSN wins over ours:
    synchronous_standby_names may refer to it.

    Args:
        dsn: as configured; it holds the password, so the result also does.
        application_name: if the DSN has none.
        is_replication: a walsender session of the DSN's database, for START_REPLICATION.
        connect_timeout_s: if the DSN has none.
        decoding_memory_bytes: for logical_decoding_work_mem; 0: as the publisher has it.

    Raises:
        ConfigError: the DSN cannot be parsed.
    """
    try:
        parameters = parameters_of(dsn)
    except Exception as error:
        # libpq's message may repeat parts of the string, the password among them.
        raise ConfigError("source.dsn: not a connection string of PostgreSQL") from error
    settings = [parameters.get("options") or "", connection_options()]
    if decoding_memory_bytes:
        settings.append(f"-c logical_decoding_work_mem={decoding_memory_bytes // 1024}kB")
    parameters["options"] = " ".join(settings).strip()
    parameters.setdefault("application_name", application_name)
    for name, value in {"connect_timeout": connect_timeout_s, **_KEEPALIVES}.items():
        parameters.setdefault(name, value)
    parameters["client_encoding"] = "UTF8"
    if is_replication:
        parameters["replication"] = "database"
    return make_conninfo(**parameters)
