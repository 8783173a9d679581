"""The configuration of several databases in one file: shared sections, and an entry for each.

In: the layers of `config.py`, with the key `databases` in the file. Out: the totals, and one `Config` for each
database. All sections are shared. An entry of `databases` wins over everything shared, wherever that is written. The
connection strings of an entry replace single parameters of the shared ones, and the name of the database is the
parameter `dbname` of both.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec.structs import replace
from psycopg import Error as DriverError
from psycopg.conninfo import make_conninfo

from parapply.config import (
    DATABASES,
    FEWEST_WORKERS,
    MEMORY_LIMIT_FLOOR_BYTES,
    REQUIRED,
    SECTIONS,
    Config,
    FleetConfig,
    Layers,
    LogConfig,
    MetricsConfig,
    config_of,
    read_layers,
)
from parapply.config_layers import merged
from parapply.config_values import did_you_mean, dotted, dsn_parameters
from parapply.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

#: Sections that belong to the process, so no database has them.
_OF_THE_PROCESS: Final = ("metrics", "log", "fleet")
#: Characters of a slot's name at most, and of the mark by which names differ whose other characters were replaced.
_SLOT_LENGTH: Final = 63
_MARK_LENGTH: Final = 8
#: Sessions of a slot on the target that are no workers': the leader's, two for questions, one for requests.
CONTROL_CONNECTIONS: Final = 4


class FleetDatabase(NamedTuple):
    """One database of the fleet."""

    #: As its entry has it, and as both servers do unless the entry says otherwise.
    name: str
    #: Its slot alone; without the sections of the process.
    config: Config
    #: Bytes of changes that it may hold in memory at most.
    memory_limit_bytes: int


class Fleet(NamedTuple):
    """Several databases that one process follows."""

    databases: tuple[FleetDatabase, ...]
    totals: FleetConfig
    metrics: MetricsConfig
    log: LogConfig


def load(
    path: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, object] | None,
    environ: Mapping[str, str] | None,
    *,
    required: Collection[str] = tuple(REQUIRED),
) -> Config | Fleet:
    """Read the layers as `config.load_config` does; return a fleet where the file names several databases.

    Raises:
        ConfigError: every error found, one line each; an error of one database begins with its entry.
    """
    layers = read_layers(path, overrides, flags, environ)
    if layers.databases is None:
        return config_of(layers, required)
    found = fleet_of(layers, required)
    check_totals(found)
    return found


def check_totals(found: Fleet) -> None:
    """Raise ConfigError, with a line for each total that does not give every database its own part."""
    if errors := _too_small(found.totals, found.databases):
        raise ConfigError("\n".join(errors))


def one_of(found: Config | Fleet, database: str | None) -> Config:
    """Return the configuration of one database, by its entry in a fleet; raise ConfigError if there is none."""
    if isinstance(found, Config):
        if database is not None:
            raise ConfigError(f"--database: the configuration has no key {DATABASES}")
        return found
    names = [one.name for one in found.databases]
    if database is None:
        raise ConfigError(f"{DATABASES}: the file is of several, and this is done for one: give --database NAME")
    if database not in names:
        raise ConfigError(f"--database: no entry of {DATABASES} has this name{did_you_mean(database, names)}")
    member = found.databases[names.index(database)]
    apply = replace(member.config.apply, memory_limit_bytes=member.memory_limit_bytes)
    return replace(member.config, apply=apply, metrics=found.metrics, log=found.log)


def fleet_of(layers: Layers, required: Collection[str] = tuple(REQUIRED)) -> Fleet:
    """Return the fleet of layers whose file names databases; the totals may be too small for it.

    Raises:
        ConfigError: as `load`.
    """
    shared = config_of(layers, ())
    errors: list[str] = []
    entries = _entries(layers.databases, errors)
    databases = [one for entry in entries if (one := _database(layers, shared, entry, required, errors)) is not None]
    errors += _shared_slots(databases)
    if errors:
        raise ConfigError("\n".join(dict.fromkeys(errors)))
    return Fleet(tuple(databases), shared.fleet, shared.metrics, shared.log)


def slot_name(prefix: str, database: str) -> str:
    """Return the name of a database's slot: the shared name, an underscore, and the database's.

    Where the name of the database holds other characters than a slot's may, or too many, they become underscores or
    are cut off, and a mark that is computed from the whole name follows.
    """
    text = re.sub(r"[^a-z0-9_]", "_", database)
    whole = f"{prefix}_{text}"
    if text == database and len(whole) <= _SLOT_LENGTH:
        return whole
    mark = sha256(database.encode("utf-8", "surrogateescape")).hexdigest()[:_MARK_LENGTH]
    return f"{whole[: _SLOT_LENGTH - _MARK_LENGTH - 1]}_{mark}"


def with_database(dsn: str, name: str) -> str:
    """Return a connection string to another database; one that libpq cannot read stays as it is."""
    try:
        return make_conninfo(dsn, dbname=name)
    except DriverError:
        return dsn


def _entries(given: object, errors: list[str]) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        errors.append(f"{DATABASES}: must be a list of names, or sections [[{DATABASES}]], at least one")
        return []
    entries, names = [], set()
    for number, one in enumerate(given, start=1):
        entry = {"name": one} if isinstance(one, str) else one
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name or "\0" in name:
            errors.append(f"{DATABASES} (number {number}): must be a name, or a section with the key name")
        elif name in names:
            errors.append(f"{_place(name)}: is named twice")
        else:
            names.add(name)
            entries.append(entry)
    return entries


def _database(
    layers: Layers, shared: Config, entry: dict[str, Any], required: Collection[str], errors: list[str]
) -> FleetDatabase | None:
    """Return the database of an entry, or None and the faults in `errors`."""
    name, sections = entry["name"], {key: value for key, value in entry.items() if key != "name"}
    place, n_before = _place(name), len(errors)
    for key, value in sections.items():
        if key in _OF_THE_PROCESS:
            errors.append(f"{place}.{key}: belongs to the process, and is one section for all databases")
        elif key not in SECTIONS:
            errors.append(f"{place}.{dotted([key])}: unknown key{did_you_mean(key, ['name', *SECTIONS])}")
        elif not isinstance(value, dict):
            errors.append(f"{place}.{key}: must be a section")
    if len(errors) > n_before:
        return None
    own = merged([_ends(sections, shared, name), sections])
    try:
        config = config_of(layers._replace(trees=[own, *layers.trees]), required)
        most = config.apply.memory_limit_bytes
        apply = replace(config.apply, memory_limit_bytes=MEMORY_LIMIT_FLOOR_BYTES)
    except ConfigError as error:
        errors += [f"{place}: {line}" for line in str(error).splitlines()]
        return None
    except ValueError:
        errors.append(f"{place}: apply.max_batch_bytes: must not be above {MEMORY_LIMIT_FLOOR_BYTES} in a fleet")
        return None
    config = replace(config, apply=apply, metrics=MetricsConfig(), log=LogConfig(), fleet=FleetConfig())
    return FleetDatabase(name, config, most)


def _ends(sections: dict[str, Any], shared: Config, name: str) -> dict[str, Any]:
    """Return slot and connection strings of an entry, made of the shared ones and its own."""
    ends: dict[str, Any] = {}
    for end, template in (("source", shared.source.dsn), ("target", shared.target.dsn)):
        own = sections.get(end, {}).get("dsn", "")
        if not isinstance(own, str) or not (own or template.get_secret_value()):
            continue  # named by the validation
        try:
            parameters = {"dbname": name, **dsn_parameters(own)}
            ends[end] = {"dsn": make_conninfo(template.get_secret_value(), **parameters)}
        except ValueError:
            continue  # the same
    if shared.source.slot and "slot" not in sections.get("source", {}):
        ends.setdefault("source", {})["slot"] = slot_name(shared.source.slot, name)
    return ends


def _shared_slots(databases: Sequence[FleetDatabase]) -> list[str]:
    """Return a line for each slot that two entries name: metrics, log files and lines know a database by its slot."""
    first: dict[str, str] = {}
    lines = []
    for one in databases:
        slot = one.config.source.slot
        if slot and slot in first:
            lines.append(f"{_place(one.name)}: source.slot: is also the slot of {_place(first[slot])}")
        first.setdefault(slot, one.name)
    return lines


def _too_small(totals: FleetConfig, databases: Sequence[FleetDatabase]) -> list[str]:
    """Return a line for each total that does not give every database its own part."""
    lines = []
    needed_bytes = MEMORY_LIMIT_FLOOR_BYTES * len(databases)
    if totals.memory_limit_bytes < needed_bytes:
        lines.append(f"fleet.memory_limit_bytes: must be at least {needed_bytes} for {len(databases)} databases")
    needed = sum([own_connections(one.config) for one in databases])
    if 0 < totals.max_connections < needed:
        lines.append(f"fleet.max_connections: must be 0, or at least {needed} for {len(databases)} databases")
    return lines


def own_connections(config: Config) -> int:
    """Return the sessions on the target that a database may always have."""
    return CONTROL_CONNECTIONS + (FEWEST_WORKERS if config.apply.workers == "auto" else config.apply.workers)


def _place(name: str) -> str:
    return dotted([DATABASES, name])
