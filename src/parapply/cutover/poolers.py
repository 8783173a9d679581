"""The poolers of a cut-over: all are paused before the fence, lead to the target, and are resumed once it takes over.

Each is noted on the target (`target/state/cutovers.py`) before it is paused and until it is resumed, so that a command
that goes on, or takes back, knows of it. A pooler is never resumed to a server that does not take the writes: on the
way back out of a cut-over it stays paused until it leads where it led before.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from psycopg.conninfo import conninfo_to_dict

from parapply import failpoints
from parapply.cutover.pooler import Place, Pooler
from parapply.errors import ConfigError, ParapplyError, TargetRefused
from parapply.printable import printable
from parapply.quoting import plain_literal
from parapply.target.state import cutovers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from parapply.cutover.look import Pair
    from parapply.target.state.cutovers import PausedPooler

#: Port of a line of PgBouncer's that names none.
_DEFAULT_PORT = 5432
#: The command that leads poolers to the target whose file is not ours to write.
LEADING = "before_turning"
#: Words of the line that say where the database is.
WHERE: Final = ("host", "port", "dbname")
_SECTION: Final = re.compile(r"\s*\[([^\]]*)\]")
_ENTRY: Final = re.compile(r'(?P<head>\s*(?P<name>"(?:[^"]|"")*"|[\w.*-]+)[ \t]*=[ \t]*)(?P<value>.*?)(?P<end>\s*)')
_WORD: Final = re.compile(r"(?P<gap>\s*)(?P<key>[^\s='\"]+)\s*=\s*(?P<value>'(?:[^']|'')*'|[^\s']\S*)")
_PLAIN: Final = re.compile(r"[\w./,:@-]+")


# Source: PgBouncer's manual, "Section [databases]"; its loader.c, cstr_get_pair.
def read_entry(path: Path, database: str) -> dict[str, str | None]:
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


def rewrite_entry(path: Path, database: str, words: Mapping[str, str | None]) -> None:
    """Give the database's line other words; None removes one. The file is replaced as a whole, or stays as it was.

    Raise ConfigError as `read_entry`, or a value cannot stand in the file; ParapplyError if it cannot be written.
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


class Poolers:
    """The poolers that the configuration of the stream that runs names, and the noted ones."""

    def __init__(self, pair: Pair, noted: Sequence[PausedPooler], warn: Callable[[str], None]) -> None:
        settings, source, target = pair.forward.cutover, pair.ahead.source.info, pair.ahead.target.info
        self._settings = settings
        self._target, self._schema, self._slot_id = pair.ahead.target, pair.forward.target.state_schema, pair.slot_id
        self._warn = warn
        names = settings.pooler_databases or (source.dbname,)
        files = settings.pooler_files
        if len(files) < len(settings.poolers):
            files = (files or ("",)) * len(settings.poolers)
        self._named: list[tuple[Pooler, str]] = [
            (Pooler(dsn.get_secret_value(), name), str(Path(file).resolve()) if file else "")
            for dsn, file in zip(settings.poolers, files, strict=True)
            for name in names
        ]
        self._noted = list(noted)
        where: dict[str, Any] = conninfo_to_dict(settings.pooler_target.get_secret_value())
        host = where.get("host") or where.get("hostaddr") or target.host
        self._place = Place(host, int(where.get("port") or target.port), where.get("dbname") or target.dbname)

    def plan(self) -> dict[str, str]:
        """Return what will be done, in words, by step; empty without poolers."""
        if not self._named:
            return {}
        names = ", ".join(str(pooler) for pooler, _ in self._named)
        files = ", ".join(dict.fromkeys(file for _, file in self._named if file)) or f"the command {LEADING}"
        return {
            "fencing": f"PAUSE {names}, within {self._settings.pause_timeout_s:g} s; ",
            "turning": f"the poolers lead to {self._place}, by {files}; ",
            "opening": f"RESUME {names}; ",
        }

    @property
    def are_held(self) -> str:
        """Names of those that may be paused; empty if none is."""
        return ", ".join(f"{one.database!r} at {one.dsn}" for one in self._noted)

    async def close(self) -> None:
        """Leave all consoles."""
        for pooler, _ in self._named:
            await pooler.close()

    # Checks before anything is made.

    async def check_named(self, *, leaves: bool) -> None:
        """Refuse to go on without one that may be paused; its note is only compared with what is named, never followed.

        Those that are not named are forgotten with a warning if `leaves`; else raise ConfigError, as with another file.
        """
        files = {(pooler.dsn, pooler.database): file for pooler, file in self._named}
        kept = []
        for one in self._noted:
            if files.get((one.dsn, one.database)) == one.file:
                kept.append(one)
                continue
            file = f"the file {one.file}" if one.file else "no file"
            what = f"{one.database!r} of the pooler at {one.dsn}, with {file}"
            if not leaves:
                raise ConfigError(
                    f"the cut-over may have paused {what}, which is not named now",
                    hint="name the same poolers and files; --leave-poolers goes on without it",
                )
            self._warn(f"{what}, is left as it is, perhaps paused: RESUME it by hand")
        if len(kept) < len(self._noted):
            await self._note(kept)

    async def refusals(self, timeout_s: float) -> list[ParapplyError]:
        """Return all that would be refused; nothing is changed."""
        found: list[ParapplyError] = []
        for pooler, file in self._named:
            try:
                await self._check(pooler, file, timeout_s)
            except ParapplyError as error:
                found.append(error)
        return found

    async def _check(self, pooler: Pooler, file: str, timeout_s: float) -> None:
        entry = await pooler.look()
        await pooler.check_rights()
        if entry.is_by_session:
            self._warn(f"{pooler} is pooled by session: PAUSE waits until each of its clients has left")
        longest_s = timeout_s + self._settings.pause_timeout_s
        if 0 < entry.wait_limit_s < longest_s:
            self._warn(
                f"{pooler}: query_wait_timeout is {entry.wait_limit_s:g} s, and clients may wait for {longest_s:g} s"
                " (--timeout, --pause-timeout): longer than that, they get an error"
            )
        if entry.is_disabled:
            raise ParapplyError(f"{pooler} is disabled", hint="ENABLE it there")
        is_noted = self._note_of(pooler) is not None
        if entry.is_paused and not is_noted:
            raise ParapplyError(f"{pooler} is paused, and not by this cut-over", hint="RESUME it there first")
        if not file and LEADING not in self._settings.commands:
            raise ConfigError(
                f"nothing leads {pooler} to the target",
                hint=f"name its file (--pooler-config), or a command {LEADING} in [cutover.commands]",
            )
        if file:
            words = read_entry(Path(file), pooler.database)
            written = Place(
                words["host"] or "", int(words["port"] or _DEFAULT_PORT), words["dbname"] or pooler.database
            )
            if not is_noted and written != entry.place:
                raise ConfigError(
                    f"{file} leads {pooler.database!r} to {written}, and {pooler} leads to {entry.place}",
                    hint="RELOAD it there, or name its own file",
                )
        if not is_noted and entry.place == self._place:
            raise ConfigError(
                f"{pooler} leads to {entry.place} already, where it is to lead after the cut-over",
                hint="lead it to the source, or correct pooler_target",
            )

    # The steps.

    async def pause(self) -> None:
        """Note all, and pause them, also those that a command before has paused.

        Raises:
            ParapplyError: transactions have not ended in time, or a console does not answer.
        """
        if not self._named:
            return
        began_s = time.monotonic()
        noted = [await self._new_note(pooler, file) for pooler, file in self._named]
        await self._note(noted)
        failpoints.probe("cutover_pausing")
        limit_s = self._settings.pause_timeout_s
        ended = await asyncio.gather(*(each.pause(limit_s) for each, _ in self._named), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error
        for pooler, _ in self._named:
            click.echo(printable(f"paused: {pooler} ({time.monotonic() - began_s:.3f} s)"))
        failpoints.probe("cutover_paused")

    async def lead_on(self) -> None:
        """Lead all to the target; they stay paused.

        Raises:
            ConfigError, ParapplyError: a file cannot be written, or a pooler does not lead there, or is not paused.
        """
        for pooler, file in self._named:
            if file:
                port = str(self._place.port)
                words = {"host": self._place.host or None, "port": port, "dbname": self._place.dbname}
                rewrite_entry(Path(file), pooler.database, words)
                failpoints.probe("cutover_rewritten")
            await pooler.reload()
            entry, note = await pooler.look(), self._note_of(pooler)
            if file and entry.place != self._place:
                raise ParapplyError(
                    f"{pooler} leads to {entry.place} still, after {file} was rewritten and read again",
                    hint="name the file that it reads (SHOW CONFIG there: conffile)",
                )
            if not file and note is not None and entry.place == Place(*note.led_to):
                self._warn(f"{pooler} leads to {entry.place} as before: that must be the target now")
            if not entry.is_paused:
                raise ParapplyError(
                    f"{pooler} is not paused any longer: it was restarted, or resumed by another command",
                    hint="see its log",
                )
            click.echo(printable(f"{pooler} leads to {entry.place}"))
        failpoints.probe("cutover_led_on")

    async def resume(self) -> None:
        """Let the clients go on, on the target.

        Raises:
            ParapplyError: one of them could not be resumed, and the others are.
        """
        for error in await self._release(list(self._noted), self._resume):
            raise error

    async def give_back(self) -> list[ParapplyError]:
        """Lead all where they led before, and let the clients go on there, the last one first; return the errors."""
        return await self._release(list(reversed(self._noted)), self._give_back)

    async def check_undoable(self) -> None:
        """Refuse to take back if clients may have come to the target.

        Raises:
            TargetRefused: a pooler leads there, and is not paused.
        """
        for note in self._noted:
            pooler = self._find(note)
            try:
                entry = await pooler.look()
            except ParapplyError:
                continue  # the end says so
            if entry.place == self._place and not entry.is_paused:
                raise TargetRefused(
                    f"{pooler} leads to the target and is not paused: it was restarted, or resumed by another command,"
                    " and its clients may have written there",
                    hint="the same command without --undo goes on",
                )

    # Parts of them.

    async def _release(
        self, notes: Sequence[PausedPooler], act: Callable[[Pooler, PausedPooler], Awaitable[None]]
    ) -> list[ParapplyError]:
        errors: list[ParapplyError] = []
        for note in notes:
            try:
                await act(self._find(note), note)
            except ParapplyError as error:
                errors.append(error)
                continue
            await self._note([one for one in self._noted if one is not note])
            failpoints.probe("cutover_resumed")
        return errors

    @staticmethod
    async def _resume(pooler: Pooler, _note: PausedPooler) -> None:
        has_waited = await pooler.resume()
        click.echo(printable(f"resumed: {pooler}" if has_waited else f"{pooler} was resumed already"))

    async def _give_back(self, pooler: Pooler, note: PausedPooler) -> None:
        before = Place(*note.led_to)
        if note.file:
            words = read_entry(Path(note.file), note.database)
            if words != note.words:
                rewrite_entry(Path(note.file), note.database, note.words)
                await pooler.reload()
        if (await pooler.look()).place != before:
            await pooler.reload()
        if (now := (await pooler.look()).place) != before:
            raise ParapplyError(
                f"{pooler} leads to {now}, and led to {before} before the cut-over; it stays paused",
                hint="correct its file, and give the same command with --undo again",
            )
        await self._resume(pooler, note)

    async def _new_note(self, pooler: Pooler, file: str) -> PausedPooler:
        known = self._note_of(pooler)
        if known is not None:
            return known
        entry = await pooler.look()
        return cutovers.PausedPooler(
            dsn=pooler.dsn,
            database=pooler.database,
            file=file,
            led_to=(entry.place.host, entry.place.port, entry.place.dbname),
            words=read_entry(Path(file), pooler.database) if file else {},
        )

    async def _note(self, noted: list[PausedPooler]) -> None:
        await cutovers.note_poolers(self._target, self._schema, self._slot_id, noted)
        self._noted = noted

    def _note_of(self, pooler: Pooler) -> PausedPooler | None:
        key = (pooler.dsn, pooler.database)
        return next((one for one in self._noted if (one.dsn, one.database) == key), None)

    def _find(self, note: PausedPooler) -> Pooler:
        """Return the pooler of a note: all are named, or were left (`check_named`)."""
        key = (note.dsn, note.database)
        return next(one for one, _ in self._named if (one.dsn, one.database) == key)
