"""The publisher's schema brought to the target with pg_dump, where it is installed.

In: both DSNs. Out: what pg_dump prints, run on the target in one transaction. Secrets go through the environment, never
through the command line, which everybody on the machine can read.

Source: PostgreSQL manual, "pg_dump", "Environment Variables" of libpq.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import TYPE_CHECKING

from psycopg import conninfo

from parapply.errors import ConfigError, SourceRefused
from parapply.target.settings import target_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parapply.target.settings import Connection

#: Not what belongs to a role or to replication: the target has its own.
_OPTIONS = ("--schema-only", "--no-owner", "--no-privileges", "--no-publications", "--no-subscriptions", "--no-sync")
#: libpq's parameters that have an environment variable, where the name is not PG and the parameter in capitals.
_VARIABLES = {
    "dbname": "PGDATABASE",
    "application_name": "PGAPPNAME",
    "channel_binding": "PGCHANNELBINDING",
    "client_encoding": "PGCLIENTENCODING",
    "connect_timeout": "PGCONNECT_TIMEOUT",
    "require_auth": "PGREQUIREAUTH",
    "target_session_attrs": "PGTARGETSESSIONATTRS",
}
#: Libpq's parameters without one, which nobody needs for a dump.
_DROPPED = ("keepalives", "tcp_user_timeout", "fallback_application_name", "replication", "options")


def find_pg_dump(path: str | None) -> str:
    """Return the program's path.

    Args:
        path: as given by the user; None to look in PATH.

    Raises:
        ConfigError: there is none.
    """
    found = shutil.which(path or "pg_dump")
    if found is None:
        raise ConfigError(
            f"{path or 'pg_dump'}: no such program",
            hint="install PostgreSQL's client programs of the publisher's version or newer, or name one with --pg-dump",
        )
    return found


def environment(dsn: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which libpq's programs connect as the DSN says.

    Raises:
        ConfigError: the DSN cannot be parsed, or has a parameter that no variable stands for.
    """
    try:
        parameters = conninfo.conninfo_to_dict(dsn)
    except Exception as error:
        raise ConfigError("source.dsn: not a connection string of PostgreSQL") from error
    variables = {name: value for name, value in environ.items() if not name.startswith("PG")}
    for name, value in parameters.items():
        if not name.startswith(_DROPPED) and value is not None:
            variables[_VARIABLES.get(name, f"PG{name.upper()}")] = str(value)
    return variables


async def bring_over(program: str, source_dsn: str, target: Connection, *, not_schema: str) -> int:
    """Make the publisher's schema on the target; return the number of bytes of SQL.

    Args:
        program: pg_dump.
        source_dsn: of the publisher.
        target: control session.
        not_schema: the state schema's name, which is left out.

    Raises:
        SourceRefused: pg_dump failed.
        TargetRefused: something is there already, or a privilege is missing; nothing was made.
        TargetLost: the connection broke.
    """
    # A pattern: in double quotes it is taken as it is.
    pattern = '"' + not_schema.replace('"', '""') + '"'
    process = await asyncio.create_subprocess_exec(
        program,
        *_OPTIONS,
        f"--exclude-schema={pattern}",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(source_dsn, os.environ),
    )
    text, errors = await process.communicate()
    if process.returncode:
        said = errors.decode(errors="replace").strip().splitlines()
        raise SourceRefused(
            f"pg_dump failed: {said[-1] if said else process.returncode}",
            hint="pg_dump must be of the publisher's version or newer, and its role may read every table",
        )
    # Commands of psql, by which newer versions keep it from running others.
    script = b"\n".join(line for line in text.split(b"\n") if not line.startswith((b"\\restrict", b"\\unrestrict")))
    # Every target has it, and a dump makes it only where the publisher's differs.
    script = script.replace(b"\nCREATE SCHEMA public;\n", b"\nCREATE SCHEMA IF NOT EXISTS public;\n")
    with target_errors("making the schema"):
        async with target.transaction():
            await target.execute(script)
            # The dump sets settings for its session.
        await target.execute("SET search_path = pg_catalog, pg_temp; SET row_security = off")
    return len(script)
