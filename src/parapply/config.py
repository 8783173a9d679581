"""The configuration: what may be set, within which bounds, and how its layers are put over each other.

In: a TOML file, the environment, ``--set`` texts and command flags. Out: one frozen `Config`, or one `ConfigError`
that lists everything that is wrong, a line each. Messages name the field and the rule, never the value: it may be a
secret. Reads the file and connects nowhere. What a key means to the operator is told in ``config/parapply.toml``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from psycopg import Error as DriverError
from psycopg.conninfo import conninfo_to_dict
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from parapply import config_layers
from parapply.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pydantic_core import ErrorDetails

#: Seconds between standby status updates: a sixth of PostgreSQL's default wal_sender_timeout (60 s), so that
#: several may be late. The daemon lowers it by itself where the publisher's timeout is shorter.
STATUS_INTERVAL_S = 10.0
#: Seconds of silence after which the publisher is taken for gone: a walsender speaks at least every half
#: wal_sender_timeout (30 s by default), so 60 s is one missed message.
RECEIVE_TIMEOUT_S = 60.0
#: Seconds before the first new attempt: a restarted server is back in about this time.
RECONNECT_MIN_S = 0.2
#: Seconds between attempts at most: what an operator waits after the repair of a long outage.
RECONNECT_MAX_S = 30.0
#: Seconds a starting daemon waits for the lease: an orderly predecessor drains in a few seconds.
LEASE_WAIT_S = 30.0
#: Target connections: half of the best gain measured comes with the second, little after the fourth.
WORKERS = 4
#: Connections at most: each is one backend of the target, and one stream cannot keep more busy.
WORKERS_LIMIT = 64
#: Source transactions a target transaction at most. Batches begin with an eighth of it and grow while the target is
#: quick with them (runtime/growth.py); what larger sets gain a row levels off before this.
MAX_BATCH_TRANSACTIONS = 20_000
#: Row changes a target transaction at most, for the same reason.
MAX_BATCH_CHANGES = 20_000
#: Bytes a target transaction at most: what libpq moves in its buffers without the quadratic copying of larger ones.
MAX_BATCH_BYTES = 8 * 1024 * 1024
#: Bytes of changes held in memory before reading stops: with Python's overhead well below 500 MB resident.
MEMORY_LIMIT_BYTES = 256 * 1024 * 1024
#: Bytes of the smallest memory limit that still lets every worker have a batch in hand and one in the queue.
MEMORY_LIMIT_FLOOR_BYTES = 16 * 1024 * 1024
#: Seconds a transaction is behind (sent minus committed, publisher's clock) before transactions are merged.
BACKLOG_THRESHOLD_S = 0.05
#: Seconds a batch waits for more while there is a backlog: less than a commit takes.
LINGER_S = 0.002
#: Seconds between durable advances of the watermark, which are the only synchronous commits.
ADVANCE_INTERVAL_S = 0.2
#: Seconds a batch may stand still before pg_blocking_pids() is asked: what a stall costs, against a question each half
#: of it. PostgreSQL's own deadlock_timeout (1 s) is for waits that it can see.
STALL_CHECK_S = 0.25
#: Row changes of one transaction above which it takes its tables whole: MAX_BATCH_CHANGES, so that only transactions
#: reach it that fill a batch by themselves.
TABLE_LOCK_THRESHOLD = 20_000
#: Seconds between two looks for changes of the target's catalogue, which are not in the stream.
CATALOGUE_CHECK_S = 5.0
#: Bytes of an apply log file before the next is begun: one task of the Spark job reads it in seconds.
ROTATE_BYTES = 64 * 1024 * 1024
#: Seconds after which a quiet apply log file is closed, so that reports see it.
ROTATE_S = 3600.0

#: Keys without a usable default, with the flag that sets each.
REQUIRED = {
    "source.dsn": "--source",
    "source.slot": "--slot",
    "source.publications": "--publication",
    "target.dsn": "--target",
}

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def _dsn(secret: SecretStr) -> SecretStr:
    try:
        conninfo_to_dict(secret.get_secret_value())
    except DriverError:
        # libpq quotes the text it stumbled over, and that may be the password.
        raise ValueError('must be a connection string: "host=... dbname=..." or postgresql://...') from None
    return secret


def _slot(name: str) -> str:
    # Source: manual, "Replication Slots": lower-case letters, digits and underscore, below NAMEDATALEN.
    if not re.fullmatch(r"[a-z0-9_]{0,63}", name):
        raise ValueError("must be 1 to 63 lower-case letters, digits or underscores")
    return name


def _schema(name: str) -> str:
    if not name or "\0" in name or len(name.encode()) > 63 or name.startswith("pg_"):
        raise ValueError("must be a schema name of 1 to 63 bytes that does not begin with pg_")
    return name


def _publications(names: tuple[str, ...]) -> tuple[str, ...]:
    if any(not name or "\0" in name for name in names) or len(set(names)) != len(names):
        raise ValueError("must be a list of different publication names")
    return names


def _table_name(name: str) -> str:
    schema, dot, table = name.partition(".")
    if not (schema and dot and table):
        raise ValueError('must be written "schema.table"')
    return name


def _none_if_empty(value: object) -> object:
    # TOML has no null: the empty text stands for "off".
    return None if value == "" else value


Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Interval = Annotated[float, Field(ge=0.001, le=86_400, allow_inf_nan=False)]
Dsn = Annotated[SecretStr, AfterValidator(_dsn)]


class _Section(BaseModel):
    """Common rules of the sections: nothing unknown, nothing coerced, nothing written afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class SourceConfig(_Section):
    """The publisher."""

    dsn: Dsn = SecretStr("")
    slot: Annotated[str, AfterValidator(_slot)] = ""
    publications: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_publications)] = ()
    origin: Literal["any", "none"] = "any"
    status_interval_s: Interval = STATUS_INTERVAL_S
    receive_timeout_s: Interval = RECEIVE_TIMEOUT_S
    reconnect_min_s: Interval = RECONNECT_MIN_S
    reconnect_max_s: Interval = RECONNECT_MAX_S

    @model_validator(mode="after")
    def _check(self) -> SourceConfig:
        if self.reconnect_min_s > self.reconnect_max_s:
            raise ValueError("reconnect_min_s must not be above reconnect_max_s")
        return self


class TargetConfig(_Section):
    """The subscriber."""

    dsn: Dsn = SecretStr("")
    state_schema: Annotated[str, AfterValidator(_schema)] = "parapply"
    session_replication_role: Literal["replica", "origin"] = "replica"
    synchronous_commit: Literal["off", "on", "local", "remote_write", "remote_apply"] = "off"
    lease_wait_s: Seconds = LEASE_WAIT_S


class TableConfig(_Section):
    """What is said about one table."""

    parallel: Literal["auto", "always", "never"] = "auto"


class ApplyConfig(_Section):
    """How changes are applied."""

    workers: Annotated[int, Field(ge=1, le=WORKERS_LIMIT)] = WORKERS
    commit_order: Literal["preserve", "relaxed"] = "preserve"
    max_batch_transactions: Annotated[int, Field(ge=1, le=1_000_000)] = MAX_BATCH_TRANSACTIONS
    max_batch_changes: Annotated[int, Field(ge=1, le=1_000_000)] = MAX_BATCH_CHANGES
    max_batch_bytes: Annotated[int, Field(ge=1024)] = MAX_BATCH_BYTES
    memory_limit_bytes: Annotated[int, Field(ge=MEMORY_LIMIT_FLOOR_BYTES)] = MEMORY_LIMIT_BYTES
    backlog_threshold_s: Seconds = BACKLOG_THRESHOLD_S
    linger_s: Seconds = LINGER_S
    advance_interval_s: Interval = ADVANCE_INTERVAL_S
    table_lock_threshold: Annotated[int, Field(ge=1)] = TABLE_LOCK_THRESHOLD
    stall_check_s: Interval = STALL_CHECK_S
    catalogue_check_s: Interval = CATALOGUE_CHECK_S
    on_error: Literal["stop", "retry"] = "stop"
    tables: dict[Annotated[str, AfterValidator(_table_name)], TableConfig] = {}

    @model_validator(mode="after")
    def _check(self) -> ApplyConfig:
        if self.max_batch_bytes > self.memory_limit_bytes:
            raise ValueError("max_batch_bytes must not be above memory_limit_bytes")
        return self


class ApplyLogConfig(_Section):
    """The apply log."""

    directory: Annotated[Path | None, Field(strict=False), BeforeValidator(_none_if_empty)] = None
    rotate_bytes: Annotated[int, Field(ge=4096)] = ROTATE_BYTES
    rotate_s: Annotated[float, Field(ge=1, le=86_400 * 366, allow_inf_nan=False)] = ROTATE_S


class LogConfig(_Section):
    """The operational log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"


class Config(_Section):
    """Everything that can be set. Reads nothing but its arguments; see `load_config`."""

    source: SourceConfig = SourceConfig()
    target: TargetConfig = TargetConfig()
    apply: ApplyConfig = ApplyConfig()
    applylog: ApplyLogConfig = ApplyLogConfig()
    log: LogConfig = LogConfig()


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    required: Collection[str] = tuple(REQUIRED),
) -> Config:
    """Read the layers: file, then environment, then ``--set``, then flags; the later wins key by key.

    Args:
        path: a TOML file, or None for no file.
        overrides: texts ``section.key=value``; a list is JSON or separated by commas.
        flags: values of command flags by dotted key; None and () mean the flag was not given.
        environ: ``PARAPPLY_SECTION__KEY`` variables among others; None is the process's environment.
        required: dotted keys among `REQUIRED` that this command cannot do without.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: every error found, one line each: dotted field and rule.
    """
    errors: list[str] = []
    given = {key: value for key, value in (flags or {}).items() if value is not None and value != ()}
    layers: list[dict[str, Any]] = [  # highest first
        config_layers.nest((key.split("."), value) for key, value in given.items()),
        config_layers.nest(config_layers.read_overrides(overrides, _fields, errors)),
        config_layers.nest(config_layers.read_environment(os.environ if environ is None else environ, _fields, errors)),
        config_layers.read_file(path, errors),
    ]
    config = None
    try:
        config = Config.model_validate(config_layers.merged(layers))
    except ValidationError as error:
        errors += [_line(details) for details in error.errors(include_input=False, include_url=False)]
    errors += [
        _missing_line(key)
        for key in REQUIRED
        if key in required and not config_layers.first_value(layers, key.split("."))
    ]
    if errors or config is None:
        # Raised out here, without a context: pydantic's own error holds the input, and a traceback would print it.
        raise ConfigError("\n".join(dict.fromkeys(errors)))
    return config


def _fields(parts: Sequence[object]) -> dict[str, Any]:
    """Return the fields of the section at a path; none where it is no section."""
    if not parts:
        return dict(Config.model_fields)
    if len(parts) == 3 and tuple(parts[:2]) == ("apply", "tables"):
        return dict(TableConfig.model_fields)
    section = Config.model_fields.get(str(parts[0])) if len(parts) == 1 else None
    return dict(section.annotation.model_fields) if section else {}  # type: ignore[union-attr]


def _missing_line(key: str) -> str:
    variable = config_layers.PREFIX + key.replace(".", "__").upper()
    return f"{key}: is required; give {REQUIRED[key]}, {variable} or the key in the file"


def _line(details: ErrorDetails) -> str:
    parts = [part for part in details["loc"] if part != "[key]"]
    name = ".".join(str(part) if _BARE.fullmatch(str(part)) else json.dumps(str(part)) for part in parts)
    if details["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(parts[-1]), _fields(parts[:-1]), n=1)
        return f"{name}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    rule = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{name}: {rule}"
