"""The configuration: its keys, their bounds, and how its layers are put over each other.

In: a TOML file, the environment, ``--set`` texts and command flags. Out: one frozen `Config`, or one `ConfigError`
that lists every fault, a line each. Messages name the field and the rule, never the value, because it may be a secret.
Reads the file and connects nowhere. The meaning of each key for the operator is in ``config/parapply.toml``.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from parapply import config_layers
from parapply.config_cutover import CutoverConfig, read_commands
from parapply.config_mapping import MappingConfig, read_places
from parapply.config_values import (
    WORKERS_LIMIT,
    Address,
    Secret,
    did_you_mean,
    dotted,
    has_password,
    plain_type,
    read_value,
)
from parapply.errors import ConfigError
from parapply.login import Login, PasswordCommand

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

#: Bytes of changes in progress on the publisher from which it begins to send them: tens of thousands of changes. With
#: PostgreSQL's own 64 MB a large transaction is decoded for a third of a second before its first row can be applied.
DECODING_MEMORY_BYTES = 16 * 1024 * 1024
#: Least value that PostgreSQL takes.
_DECODING_MEMORY_FLOOR_BYTES = 64 * 1024
#: Bytes of WAL read at once while there is much to catch up. The publisher keeps a range's changes in memory (work_mem)
#: until it is decoded; a larger one gains little, because the WAL before each range costs little.
CATCH_UP_RANGE_BYTES = 64 * 1024 * 1024
#: Bytes of WAL to catch up from which ranges are read: 30,000 deletes of a row, half a second of a stream.
CATCH_UP_ENTER_BYTES = 4 * 1024 * 1024
#: Seconds a stream runs at least before ranges are read again: far longer than both ends take to be opened again.
CATCH_UP_PAUSE_S = 30.0
#: Sessions at most that read a backlog at once: each is a decoder, so a processor of the publisher's.
_MOST_READERS = 8
#: Seconds between standby status updates: a sixth of PostgreSQL's default wal_sender_timeout (60 s), so that
#: several may be late. The daemon lowers it where the publisher's timeout is shorter.
STATUS_INTERVAL_S = 10.0
#: Seconds of silence after which the publisher counts as gone: a walsender speaks at least every half
#: wal_sender_timeout (30 s by default), so 60 s is one missed message.
RECEIVE_TIMEOUT_S = 60.0
#: Seconds before the first new attempt: a restarted server is back in about this time.
RECONNECT_MIN_S = 0.2
#: Seconds between attempts at most, and so the wait after the end of an outage: as often as the built-in subscription
#: (wal_retrieve_retry_interval). An attempt in vain costs one session on the other end and one line of log.
RECONNECT_MAX_S = 5.0
#: Seconds a starting daemon waits for the lease: an orderly predecessor drains in a few seconds.
LEASE_WAIT_S = 30.0
#: Target connections at most while their number finds itself: a disk still answers sixteen reads at a time
#: faster than eight.
MAX_WORKERS = 16
#: Connections when it begins to find itself, and the fewest: half of the best gain measured in memory comes with the
#: second, little after the fourth.
FIRST_WORKERS = 4
FEWEST_WORKERS = 2
#: Source transactions a target transaction at most. Batches begin smaller and grow while the target is quick with them
#: (engine/intake.py); the gain of larger sets a row levels off before this.
MAX_BATCH_TRANSACTIONS = 20_000
#: Row changes a target transaction at most, for the same reason.
MAX_BATCH_CHANGES = 20_000
#: Bytes a target transaction at most: libpq moves this in its buffers without the quadratic copying of larger ones.
MAX_BATCH_BYTES = 8 * 1024 * 1024
#: Bytes of changes held in memory before reading stops: with Python's overhead well below 500 MB resident.
MEMORY_LIMIT_BYTES = 256 * 1024 * 1024
#: Bytes of the smallest memory limit that still lets every worker have a batch in hand and one in the queue.
MEMORY_LIMIT_FLOOR_BYTES = 16 * 1024 * 1024
#: Seconds a batch waits for more while there is a backlog: less than a commit takes.
LINGER_S = 0.002
#: Seconds between durable advances of the watermark, which are the only synchronous commits.
ADVANCE_INTERVAL_S = 0.2
#: Seconds a batch may make no progress before pg_blocking_pids() is called: what a stall costs, against a query each
#: half of it. PostgreSQL's own deadlock_timeout (1 s) is for waits that it can see.
STALL_CHECK_S = 0.25
#: Bytes of a transaction in progress, counted with what Python needs for it, before a worker follows it: a few
#: thousand changes. A smaller one is merged with others at its commit, which is worth more.
STREAM_START_BYTES = 1024 * 1024
#: Bytes on disk for the changes of transactions in progress: each is kept there until it ends.
SPILL_LIMIT_BYTES = 16 * 1024 * 1024 * 1024
#: Seconds between two checks for changes of the target's catalogue, which are not in the stream.
CATALOGUE_CHECK_S = 5.0
#: Seconds a conflict is kept on the target: a month, within which an operator will have looked.
KEEP_S = 30 * 86_400.0
#: Conflicts kept on the target at most: a few hundred megabytes with rows of ordinary width.
KEEP_ROWS = 100_000
#: Bytes of an apply log file before the next is begun: one task of the Spark job reads it in seconds.
ROTATE_BYTES = 64 * 1024 * 1024
#: Seconds after which a quiet apply log file is closed, so that reports see it.
ROTATE_S = 3600.0
#: Bytes of finished apply log files kept: a day of 150 single transactions a second, years of batches.
RETENTION_BYTES = 10 * 1024 * 1024 * 1024

#: Bytes of changes that all slots of a process hold in memory together: four times one slot's.
FLEET_MEMORY_LIMIT_BYTES = 1024 * 1024 * 1024

#: Rows that a heal copies or deletes at most: minutes, and a few hundred megabytes of keys in memory.
HEAL_LIMIT_ROWS = 1_000_000

#: Seconds that changes are held back at most: the publisher keeps the WAL of all of them.
DELAY_LIMIT_S = 7 * 86_400.0

#: Keys without a usable default, with the flag that sets each.
REQUIRED = {
    "source.dsn": "--source",
    "source.slot": "--slot",
    "source.publications": "--publication",
    "target.dsn": "--target",
}

#: As `ddl.role`: each command runs as the role of the name that it ran as on the publisher.
SAME_ROLE: Final = "*"
#: Command tags that run on the target: what makes and changes tables, and what they consist of. Not among them: code
#: (functions, triggers, rules), privileges and owners, and what belongs to the server as a whole.
DDL_TAGS: Final = (
    "ALTER DOMAIN",
    "ALTER INDEX",
    "ALTER MATERIALIZED VIEW",
    "ALTER SCHEMA",
    "ALTER SEQUENCE",
    "ALTER STATISTICS",
    "ALTER TABLE",
    "ALTER TYPE",
    "ALTER VIEW",
    "COMMENT",
    "CREATE DOMAIN",
    "CREATE INDEX",
    "CREATE MATERIALIZED VIEW",
    "CREATE SCHEMA",
    "CREATE SEQUENCE",
    "CREATE STATISTICS",
    "CREATE TABLE",
    "CREATE TYPE",
    "CREATE VIEW",
    "DROP DOMAIN",
    "DROP INDEX",
    "DROP MATERIALIZED VIEW",
    "DROP SCHEMA",
    "DROP SEQUENCE",
    "DROP STATISTICS",
    "DROP TABLE",
    "DROP TYPE",
    "DROP VIEW",
)

Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Interval = Annotated[float, Meta(ge=0.001, le=86_400)]


class _Section(msgspec.Struct, frozen=True):
    """A section, never changed once made. Values from outside are checked by `_read_section`."""


class _End(_Section, frozen=True):
    dsn: Secret = Secret("")
    password_command: PasswordCommand | None = None

    def __post_init__(self) -> None:
        if self.password_command is not None and has_password(self.dsn):
            raise ValueError("password_command must be left out, or the password in dsn")

    @property
    def login(self) -> Login:
        return Login(self.dsn.get_secret_value(), self.password_command)


class SourceConfig(_End, frozen=True):
    """The publisher."""

    slot: str = ""
    publications: tuple[str, ...] = ()
    origin: Literal["any", "none"] = "any"
    streaming: Literal["auto", "off", "on", "parallel"] = "auto"
    decoding_memory_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = DECODING_MEMORY_BYTES
    two_phase: bool = False
    failover: Literal["auto", "off"] = "off"
    catch_up: Literal["auto", "off"] = "auto"
    catch_up_range_bytes: Annotated[int, Meta(ge=1024, le=1 << 34)] = CATCH_UP_RANGE_BYTES
    catch_up_enter_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = CATCH_UP_ENTER_BYTES
    catch_up_pause_s: Seconds = CATCH_UP_PAUSE_S
    catch_up_readers: Annotated[int, Meta(ge=1, le=_MOST_READERS)] = 1
    status_interval_s: Interval = STATUS_INTERVAL_S
    receive_timeout_s: Interval = RECEIVE_TIMEOUT_S
    retained_wal_limit_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    on_retained_wal: Literal["warn", "pause_copy", "drop_slot"] = "warn"
    on_lost_slot: Literal["stop", "heal"] = "stop"
    heal_limit_rows: Annotated[int, Meta(ge=0, le=1 << 50)] = HEAL_LIMIT_ROWS
    reconnect_min_s: Interval = RECONNECT_MIN_S
    reconnect_max_s: Interval = RECONNECT_MAX_S

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reconnect_min_s > self.reconnect_max_s:
            raise ValueError("reconnect_min_s must not be above reconnect_max_s")
        if self.on_lost_slot == "heal" and self.origin == "none":
            raise ValueError(
                'on_lost_slot must be "stop" with origin = "none": rows of clients of the target would be deleted'
            )
        if 0 < self.decoding_memory_bytes < _DECODING_MEMORY_FLOOR_BYTES:
            raise ValueError(f"decoding_memory_bytes must be 0 or at least {_DECODING_MEMORY_FLOOR_BYTES}")


class TargetConfig(_End, frozen=True):
    """The subscriber."""

    state_schema: str = "parapply"
    session_replication_role: Literal["replica", "origin"] = "replica"
    apply_as: Literal["owner", "role"] = "owner"
    synchronous_commit: Literal["off", "on", "local", "remote_write", "remote_apply"] = "off"
    # At most 30 years, for a daemon that stands by.
    lease_wait_s: Annotated[float, Meta(ge=0, le=1_000_000_000)] = LEASE_WAIT_S


class TableConfig(_Section, frozen=True):
    """Settings of one table."""

    parallel: Literal["auto", "ordered", "always", "never"] = "auto"


class ApplyConfig(_Section, frozen=True):
    """How changes are applied."""

    workers: int | Literal["auto"] = "auto"
    max_workers: Annotated[int, Meta(ge=FEWEST_WORKERS, le=WORKERS_LIMIT)] = MAX_WORKERS
    commit_order: Literal["preserve", "relaxed"] = "preserve"
    max_batch_transactions: Annotated[int, Meta(ge=1, le=1_000_000)] = MAX_BATCH_TRANSACTIONS
    max_batch_changes: Annotated[int, Meta(ge=1, le=1_000_000)] = MAX_BATCH_CHANGES
    max_batch_bytes: Annotated[int, Meta(ge=1024)] = MAX_BATCH_BYTES
    memory_limit_bytes: Annotated[int, Meta(ge=MEMORY_LIMIT_FLOOR_BYTES)] = MEMORY_LIMIT_BYTES
    linger_s: Seconds = LINGER_S
    delay_s: Annotated[float, Meta(ge=0, le=DELAY_LIMIT_S)] = 0.0
    max_changes_per_s: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    advance_interval_s: Interval = ADVANCE_INTERVAL_S
    stall_check_s: Interval = STALL_CHECK_S
    stream_start_bytes: Annotated[int, Meta(ge=0)] = STREAM_START_BYTES
    spill_dir: Path | None = None
    spill_limit_bytes: Annotated[int, Meta(ge=1024 * 1024)] = SPILL_LIMIT_BYTES
    catalogue_check_s: Interval = CATALOGUE_CHECK_S
    on_error: Literal["stop", "retry"] = "stop"
    tables: dict[str, TableConfig] = {}

    def __post_init__(self) -> None:
        if self.max_batch_bytes > self.memory_limit_bytes:
            raise ValueError("max_batch_bytes must not be above memory_limit_bytes")

    @property
    def held_back_by(self) -> str:
        """The setting by which changes are held back on purpose, so that they are read when they may be applied."""
        return "apply.delay_s" if self.delay_s else "apply.max_changes_per_s" if self.max_changes_per_s else ""

    @property
    def first_workers(self) -> int:
        """Workers at the begin of an epoch."""
        return min(FIRST_WORKERS, self.max_workers) if self.workers == "auto" else self.workers

    @property
    def most_workers(self) -> int:
        """Workers at most."""
        return self.max_workers if self.workers == "auto" else self.workers


#: Policies by the two sides of a conflict. Those left out make no sense, because no row can win that is not there.
_Exists = Literal["error", "skip", "apply_remote", "keep_local", "last_update_wins"]
_UpdateMissing = Literal["error", "skip", "apply_remote"]
_DeleteMissing = Literal["error", "skip"]
_OriginDiffers = Literal["off", "error", "skip", "apply_remote", "keep_local", "last_update_wins"]


class TableConflictConfig(_Section, frozen=True):
    """Policies of one table; None: the policy for all tables."""

    insert_exists: _Exists | None = None
    update_exists: _Exists | None = None
    multiple_unique_conflicts: _Exists | None = None
    update_missing: _UpdateMissing | None = None
    delete_missing: _DeleteMissing | None = None
    update_origin_differs: _OriginDiffers | None = None
    delete_origin_differs: _OriginDiffers | None = None


class ConflictConfig(_Section, frozen=True):
    """Policies for conflicts, and how long conflicts are kept."""

    insert_exists: _Exists = "error"
    update_exists: _Exists = "error"
    multiple_unique_conflicts: _Exists = "error"
    update_missing: _UpdateMissing = "error"
    delete_missing: _DeleteMissing = "error"
    update_origin_differs: _OriginDiffers = "off"
    delete_origin_differs: _OriginDiffers = "off"
    keep_s: Annotated[float, Meta(ge=0, le=86_400 * 36_500)] = KEEP_S
    keep_rows: Annotated[int, Meta(ge=0, le=1_000_000_000)] = KEEP_ROWS
    tables: dict[str, TableConflictConfig] = {}


class DdlConfig(_Section, frozen=True):
    """Commands of the publisher, run on the target in their place."""

    apply: bool = False
    role: str = ""
    tags: tuple[str, ...] = DDL_TAGS
    skip: tuple[int, ...] = ()


class SequencesConfig(_Section, frozen=True):
    """Sequences, which are not in the stream."""

    interval_s: Seconds = 0.0


class ApplyLogConfig(_Section, frozen=True):
    """The apply log."""

    directory: Path | None = None
    rotate_bytes: Annotated[int, Meta(ge=4096)] = ROTATE_BYTES
    rotate_s: Annotated[float, Meta(ge=1, le=86_400 * 366)] = ROTATE_S
    retention_s: Annotated[float, Meta(ge=0, le=86_400 * 3660)] = 0.0
    retention_bytes: Annotated[int, Meta(ge=0)] = RETENTION_BYTES
    detail: Literal["batch", "transaction"] = "batch"

    def __post_init__(self) -> None:
        if 0 < self.retention_bytes < self.rotate_bytes:
            raise ValueError("retention_bytes must be 0 or not below rotate_bytes")
        if 0 < self.retention_s < self.rotate_s:
            raise ValueError("retention_s must be 0 or not below rotate_s")


class MetricsConfig(_Section, frozen=True):
    """The endpoint for Prometheus and for probes."""

    listen: Address | None = None


class LogConfig(_Section, frozen=True):
    """The operational log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "logfmt", "console"] = "json"


class FleetConfig(_Section, frozen=True):
    """Totals of a process that follows several databases; without meaning where it follows one."""

    max_connections: Annotated[int, Meta(ge=0, le=100_000)] = 0
    memory_limit_bytes: Annotated[int, Meta(ge=MEMORY_LIMIT_FLOOR_BYTES)] = FLEET_MEMORY_LIMIT_BYTES
    spill_limit_bytes: Annotated[int, Meta(ge=1024 * 1024)] = SPILL_LIMIT_BYTES


class Config(_Section, frozen=True):
    """Everything that can be set. Reads nothing but its arguments; see `load_config`."""

    source: SourceConfig = SourceConfig()
    target: TargetConfig = TargetConfig()
    apply: ApplyConfig = ApplyConfig()
    conflict: ConflictConfig = ConflictConfig()
    ddl: DdlConfig = DdlConfig()
    mapping: MappingConfig = MappingConfig()
    sequences: SequencesConfig = SequencesConfig()
    cutover: CutoverConfig = CutoverConfig()
    applylog: ApplyLogConfig = ApplyLogConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    fleet: FleetConfig = FleetConfig()


def settings_without_table(config: Config, published: Collection[str]) -> dict[str, str]:
    """Return the sections that name a table (schema.table) which is not published, each with it and the name meant.

    A section of a schema is one if no table of it is published.
    """
    sections: dict[str, Collection[str]] = {
        "apply": config.apply.tables,
        "conflict": config.conflict.tables,
        "mapping": config.mapping.tables,
    }
    schemas = {name.partition(".")[0] for name in published}
    return {
        f'{section}.tables."{name}"': f"{name} is no published table{did_you_mean(name, published)}"
        for section, tables in sections.items()
        for name in tables
        if name not in published
    } | {
        f"mapping.schemas.{name}": f"no table of schema {name} is published{did_you_mean(name, schemas)}"
        for name in config.mapping.schemas
        if name not in schemas
    }


#: Sections of `Config`, by name.
SECTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "source": SourceConfig,
    "target": TargetConfig,
    "apply": ApplyConfig,
    "conflict": ConflictConfig,
    "ddl": DdlConfig,
    "mapping": MappingConfig,
    "sequences": SequencesConfig,
    "cutover": CutoverConfig,
    "applylog": ApplyLogConfig,
    "metrics": MetricsConfig,
    "log": LogConfig,
    "fleet": FleetConfig,
}

#: The key of a file that names several databases (`config_fleet.py`), beside the sections.
DATABASES: Final = "databases"

#: Sections of single tables, by path.
_TABLE_SECTIONS: Final[dict[tuple[str, ...], type[msgspec.Struct]]] = {
    ("apply", "tables"): TableConfig,
    ("conflict", "tables"): TableConflictConfig,
}

#: Sections by names of the publisher, by path.
_NAME_SECTIONS: Final = (("mapping", "tables"), ("mapping", "schemas"))


class Layers(NamedTuple):
    """The layers of the configuration as trees, highest first, and their faults so far."""

    trees: list[dict[str, Any]]
    #: Databases of the file that names several; None: it names none.
    databases: object
    errors: list[str]
    #: False if the file cannot be read: no key is reported missing then, because the file may set it.
    is_read: bool
    option: str


def read_layers(
    path: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, object] | None,
    environ: Mapping[str, str] | None,
    *,
    option: str = "--config",
) -> Layers:
    """Read file, environment, ``--set`` texts and flags; arguments as `load_config`. Faults are in the result."""
    errors: list[str] = []
    given = {key: value for key, value in (flags or {}).items() if value is not None and value != ()}
    trees: list[dict[str, Any]] = [
        config_layers.nest((key.split("."), value) for key, value in given.items()),
        config_layers.nest(config_layers.read_overrides(overrides, _fields, errors)),
        config_layers.nest(config_layers.read_environment(os.environ if environ is None else environ, _fields, errors)),
    ]
    n_before = len(errors)
    file = config_layers.read_file(path, errors, option)
    databases = file.pop(DATABASES, None)
    return Layers([*trees, file], databases, errors, len(errors) == n_before, option)


def config_of(layers: Layers, required: Collection[str] = tuple(REQUIRED)) -> Config:
    """Return the validated configuration; the higher layer wins key by key.

    Raises:
        ConfigError: every error found, one line each: dotted field and rule.
    """
    errors = [*layers.errors]
    tree = config_layers.merged(layers.trees)
    errors += [_unknown_line([name], SECTIONS) for name in tree if name not in SECTIONS]
    sections = {name: _read_section([name], kind, tree.get(name, {}), errors) for name, kind in SECTIONS.items()}
    errors += [
        _missing_line(key)
        for key in REQUIRED
        if layers.is_read and key in required and not config_layers.first_value(layers.trees, key.split("."))
    ]
    source, apply = sections["source"], sections["apply"]
    if source is not None and apply is not None and source.on_lost_slot == "heal" and apply.delay_s:
        errors.append('source.on_lost_slot: must be "stop" with apply.delay_s, because a heal brings the newest rows')
    ddl, mapping = sections["ddl"], sections["mapping"]
    if ddl is not None and mapping is not None and ddl.apply and not mapping.is_empty:
        errors.append("mapping: must be empty with ddl.apply, whose commands name tables as the publisher does")
    if source is not None and mapping is not None:
        if source.on_lost_slot == "heal" and mapping.replaces:
            errors.append(
                'source.on_lost_slot: must be "stop" with `replace` in [mapping], whose rows no heal compares'
            )
        if source.origin == "none" and mapping.masks:
            errors.append(
                'mapping: no `replace` or `omit` with source.origin = "none", whose rows would go back without values'
            )
    if errors:
        place = "" if layers.option == "--config" else f"{layers.option}: "
        raise ConfigError("\n".join(place + line.removeprefix(place) for line in dict.fromkeys(errors)))
    return Config(**sections)


def load_config(  # noqa: PLR0913  the layers
    path: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    required: Collection[str] = tuple(REQUIRED),
    option: str = "--config",
) -> Config:
    """Read the layers: file, then environment, then ``--set``, then flags; the later wins key by key.

    Args:
        path: a TOML file, or None for no file.
        overrides: texts ``section.key=value``; a list is JSON or separated by commas.
        flags: values of command flags by dotted key; None and () mean the flag was not given.
        environ: ``PARAPPLY_SECTION__KEY`` variables among others; None is the process's environment.
        required: dotted keys among `REQUIRED` that this command cannot do without.
        option: that named the file; each line names another one than --config.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: every error found, one line each: dotted field and rule.
    """
    layers = read_layers(path, overrides, flags, environ, option=option)
    if layers.databases is not None:
        layers.errors.append(f"{DATABASES}: the file is of several databases, and this needs a file of one")
    return config_of(layers, required)


def _read_section(path: list[str], kind: type[msgspec.Struct], given: object, errors: list[str]) -> Any:  # noqa: ANN401  of `kind`
    """Return the section made of the given values, or None and their faults, a line each, in `errors`."""
    if not isinstance(given, dict):
        errors.append(f"{dotted(path)}: must be a section")
        return None
    kinds = _types(kind) if given else {}
    n_before = len(errors)
    values: dict[str, object] = {}
    for key, value in given.items():
        place = [*path, key]
        if key not in kinds:
            errors.append(_unknown_line(place, kinds))
        elif tuple(place) in _TABLE_SECTIONS:
            values[key] = _read_tables(place, value, errors)
        elif tuple(place) in _NAME_SECTIONS:
            values[key] = read_places(place, value, errors)
        elif place == ["cutover", "commands"]:
            values[key] = read_commands(place, value, errors)
        else:
            values[key] = read_value(place, kinds[key], value, errors)
    if len(errors) > n_before:
        return None
    try:
        return kind(**values)
    except ValueError as error:
        errors.append(f"{dotted(path)}: {error}")
        return None


def _read_tables(path: list[str], given: object, errors: list[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        errors.append(f"{dotted(path)}: must be a section")
        return {}
    for name in given:
        schema, dot, table = name.partition(".")
        if not (schema and dot and table):
            errors.append(f'{dotted([*path, name])}: must be written "schema.table"')
    kind = _TABLE_SECTIONS[tuple(path)]
    return {name: _read_section([*path, name], kind, value, errors) for name, value in given.items()}


def _fields(parts: Sequence[str]) -> dict[str, object]:
    """Return the plain types, by name, of the keys at a path; none if it is no section."""
    if not parts:
        return dict(SECTIONS)
    of_table = _TABLE_SECTIONS.get(tuple(parts[:2])) if len(parts) == 3 else None
    kind = of_table or (SECTIONS.get(parts[0]) if len(parts) == 1 else None)
    return {name: plain_type(of) for name, of in _types(kind).items()} if kind else {}


@cache
def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the types of a section's fields by name; to evaluate the annotations takes a millisecond."""
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _missing_line(key: str) -> str:
    variable = config_layers.PREFIX + key.replace(".", "__").upper()
    return f"{key}: is required; give {REQUIRED[key]}, {variable} or the key in the file"


def _unknown_line(path: Sequence[str], known: Collection[str]) -> str:
    return f"{dotted(path)}: unknown key{did_you_mean(path[-1], known)}"
