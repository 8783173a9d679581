"""The line of a database in a pgbouncer.ini, read and rewritten: host, port and dbname; all else stays as it is.

In: path of the file, name of the database as clients give it. Source: PgBouncer's manual, "Section [databases]"; its
loader.c, cstr_get_pair.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, Final

from parapply.errors import ConfigError, ParapplyError
from parapply.quoting import plain_literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: Words of the line that say where the database is.
WHERE: Final = ("host", "port", "dbname")
_SECTION: Final = re.compile(r"\s*\[([^\]]*)\]")
_ENTRY: Final = re.compile(r'(?P<head>\s*(?P<name>"(?:[^"]|"")*"|[\w.*-]+)[ \t]*=[ \t]*)(?P<value>.*?)(?P<end>\s*)')
_WORD: Final = re.compile(r"(?P<gap>\s*)(?P<key>[^\s='\"]+)\s*=\s*(?P<value>'(?:[^']|'')*'|[^\s']\S*)")
_PLAIN: Final = re.compile(r"[\w./,:@-]+")


def read(path: Path, database: str) -> dict[str, str | None]:
    """Return host, port and dbname of a database's line; None: it does not name them.

    Raises:
        ConfigError: the file cannot be read or rewritten, or has no such line of its own.
    """
    lines, number = _find(path, database)
    found = {found["key"]: _unquoted(found["value"]) for found in _words(path, _value(lines[number]), database)}
    folder, status = path.resolve().parent, path.stat()
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: no file can be written there", hint="run the cut-over as the file's owner")
    if os.geteuid() not in {0, status.st_uid}:
        raise ConfigError(f"{path} belongs to another user", hint="run the cut-over as the file's owner")
    return {key: found.get(key) for key in WHERE}


def rewrite(path: Path, database: str, words: Mapping[str, str | None]) -> None:
    """Give the database's line other words; None removes one. The file is replaced as a whole, or stays as it was.

    Raises:
        ConfigError: as `read`, or a value cannot stand in the file.
        ParapplyError: it cannot be written.
    """
    lines, number = _find(path, database)
    entry = _ENTRY.fullmatch(lines[number])
    assert entry is not None
    left = dict(words)
    parts = []
    for found in _words(path, entry["value"], database):
        key = found["key"]
        if key not in words:
            parts.append(found[0])
        elif (new := left.pop(key, None)) is not None:
            parts.append(f"{found['gap']}{key}={_quoted(new)}")
    parts += [f" {key}={_quoted(new)}" for key, new in left.items() if new is not None]
    lines[number] = f"{entry['head']}{''.join(parts).lstrip()}{entry['end']}"
    _replace(path.resolve(), "\n".join(lines))


def _find(path: Path, database: str) -> tuple[list[str], int]:
    try:
        # Not as text, which would lose the ends of lines that Windows writes.
        lines = path.read_bytes().decode("utf-8", "surrogateescape").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="name the pooler's pgbouncer.ini") from error
    section, numbers = "", []
    for number, line in enumerate(lines):
        if (head := _SECTION.match(line)) is not None:
            section = head[1].strip()
        elif section == "databases" and (entry := _ENTRY.fullmatch(line)) is not None:
            name = entry["name"]
            if (name[1:-1].replace('""', '"') if name.startswith('"') else name) == database:
                numbers.append(number)
    if len(numbers) != 1:
        raise ConfigError(
            f"{path} has {len(numbers)} lines for the database {database!r} in its section [databases]",
            hint="give it one there, or another file; `*` and included files are not rewritten",
        )
    return lines, numbers[0]


def _value(line: str) -> str:
    entry = _ENTRY.fullmatch(line)
    assert entry is not None
    return entry["value"]


def _words(path: Path, value: str, database: str) -> list[re.Match[str]]:
    found, position = [], 0
    while value[position:].strip():
        word = _WORD.match(value, position)
        if word is None:
            raise ConfigError(
                f"{path}: the line of the database {database!r} is not key=value ... as PgBouncer reads it",
                hint="correct the line",
            )
        found.append(word)
        position = word.end()
    return found


def _unquoted(value: str) -> str:
    return value[1:-1].replace("''", "'") if value.startswith("'") else value


def _quoted(value: str) -> str:
    if not value.isprintable():
        raise ConfigError(f"{value!r} cannot stand in a line of pgbouncer.ini", hint="correct target.dsn")
    return value if _PLAIN.fullmatch(value) else plain_literal(value)


def _replace(path: Path, text: str) -> None:
    """Write a file beside it, with the same owner and rights, and put it in its place."""
    new = path.with_name(f".{path.name}.parapply")
    status = path.stat()
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
            file.write(text.encode("utf-8", "surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ParapplyError(f"cannot write {path}: {error.strerror}", hint="make room, or the rights to") from error
