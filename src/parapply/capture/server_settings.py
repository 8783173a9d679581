"""Settings of the target's server in a group, `server.NAME=value`.

The sessions of the run get them when they connect. Nothing is written on the server, so nothing has to be taken back
there, whenever the run ends. A setting that no session may have must already be so on the server.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec
import psycopg
from psycopg import conninfo, sql

from parapply.config_values import Secret
from parapply.driver import parameters_of
from parapply.errors import ConfigError
from parapply.printable import printable
from parapply.quoting import copyable, setting, startup_option
from parapply.target.session import settings
from parapply.target.session.settings import first_line, rows, target_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parapply.config import Config

_PREFIX: Final = "server."
#: Values of pg_settings.context that allow a session to have its own value.
_OF_SESSIONS: Final = frozenset({"user", "superuser"})
_LOOK: Final = sql.SQL(
    "SELECT name, context, setting, pg_catalog.current_setting(name) FROM pg_catalog.pg_settings"
    " WHERE pg_catalog.lower(name) = pg_catalog.lower($1)"
)
_TRY: Final = sql.SQL("SELECT pg_catalog.set_config($1, $2, true)")
_SHOW: Final = sql.SQL("SELECT pg_catalog.current_setting($1)")
#: By pg_settings.context.
_TAKES: Final = {"sighup": "run SELECT pg_reload_conf() there", "postmaster": "restart it"}


def divided(pairs: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the settings of the daemon in a group, and the server's by name."""
    own = [pair for pair in pairs if not pair.startswith(_PREFIX)]
    asked = [pair.removeprefix(_PREFIX).partition("=") for pair in pairs if pair.startswith(_PREFIX)]
    return own, {name: value for name, _, value in asked}


async def for_sessions(conn: settings.Connection, config: Config, asked: Mapping[str, str]) -> Config:
    """Return a configuration whose target sessions have the server's settings.

    Raises:
        ConfigError: the server has no such setting, does not take the value, or no session can have it.
    """
    given: dict[str, str] = {}
    shown: dict[str, str] = {}
    for name, value in asked.items():
        with target_errors("looking at its settings"):
            found = await rows(conn, _LOOK, [name])
            if not found:
                raise ConfigError(
                    f"--run: server.{name}: the target has no setting {name}", hint="SHOW ALL on the target lists them"
                )
            ((known, context, raw, now),) = found
            if context not in _OF_SESSIONS:
                if value.lower() not in {raw.lower(), now.lower()}:
                    raise _fixed(known, value, context, now)
                continue
            given[known], shown[known] = value, await _tried(conn, known, value)
    if not given:
        return config
    config = _with_options(config, given)
    await _check_in_force(config, shown)
    return config


def _fixed(name: str, value: str, context: str, now: str) -> ConfigError:
    message = f"--run: server.{name}={value}: no session can set it, and the target has {now}"
    if context not in _TAKES:
        return ConfigError(message, hint="leave it out")
    try:
        statement = copyable(f"ALTER SYSTEM SET {setting(name, value)}")
    except ValueError as error:
        return ConfigError(f"{message}: {error}", hint="correct the value")
    return ConfigError(
        message,
        hint=f"leave this --run out; when the others are done run {statement} on the target, {_TAKES[context]},"
        f" and give this --run also, with the value as SHOW {name} writes it",
    )


async def _tried(conn: settings.Connection, name: str, value: str) -> str:
    try:
        async with conn.transaction(force_rollback=True):
            ((shown,),) = await rows(conn, _TRY, [name, value])
    except (psycopg.DataError, psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
        is_denied = isinstance(error, psycopg.errors.InsufficientPrivilege)
        hint = f"GRANT SET ON PARAMETER {name} TO the target's role" if is_denied else "correct the value"
        raise ConfigError(f"--run: server.{name}: {first_line(error)}", hint=hint) from error
    return str(shown)


def _with_options(config: Config, given: Mapping[str, str]) -> Config:
    dsn = config.target.dsn.get_secret_value()
    before = parameters_of(dsn).get("options") or os.environ.get("PGOPTIONS", "")
    options = " ".join([before, *[startup_option(name, value) for name, value in given.items()]]).strip()
    target = msgspec.structs.replace(config.target, dsn=Secret(conninfo.make_conninfo(dsn, options=options)))
    return msgspec.structs.replace(config, target=target)


async def _check_in_force(config: Config, shown: Mapping[str, str]) -> None:
    """Refuse settings that a worker's session has not got, because the daemon gives them a value there.

    Raises:
        ConfigError: names the first one.
        TargetRefused, TargetLost: there is no such session.
    """
    target = config.target
    with target_errors("connecting with the settings of --run"):
        conn = await settings.open_session(target.login, "parapply replay")
    async with conn:
        await settings.pin_session(
            conn, kind="worker", role=target.session_replication_role, synchronous_commit=target.synchronous_commit
        )
        for name, value in shown.items():
            with target_errors("looking at its settings"):
                ((now,),) = await rows(conn, _SHOW, [name])
            if now != value:
                raise ConfigError(
                    f"--run: server.{name}={value}: parapply sets it to {printable(now)} in its sessions",
                    hint="leave it out, or name target.synchronous_commit or target.session_replication_role instead",
                )
