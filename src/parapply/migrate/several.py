"""`parapply migrate` of several databases: what belongs to a server once, then each database, the largest first.

In: the configuration and options of each database. Out: the end of each one; an error of one stops no other. All
databases share the connections of copies, index builds and statistics. As many databases as connections are under way.

Each database has the steps, notes and lock of its own migration. Roles, tablespaces and databases need no note, because
one that exists is complete. The last step is left to the daemon of all databases.
"""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections import defaultdict
from contextlib import asynccontextmanager, contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
from msgspec.structs import replace
from psycopg.conninfo import conninfo_to_dict

from parapply.amounts import brief
from parapply.config import DATABASES, Config, MetricsConfig
from parapply.config_fleet import with_database
from parapply.connect import Connections
from parapply.copy.places import Access, Places
from parapply.database_lines import DatabaseLines, about
from parapply.errors import ConfigError, ParapplyError, TargetRefused
from parapply.login import Login
from parapply.logs import redact_text
from parapply.migrate import command, instance, roles
from parapply.migrate.show import Screen
from parapply.migrate.show import steps as steps_of
from parapply.printable import printable
from parapply.quoting import toml_string
from parapply.source import slot
from parapply.target.session import settings
from parapply.tasks import end_tasks
from parapply.vocabulary import MigrationStep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.live import Live
    from rich.table import Table

    from parapply.migrate.options import MigrateOptions
    from parapply.target.state.migrations import StepRow

#: Database of the target in which the others are made.
_OUTSIDE: Final = "postgres"
_MEGABYTE: Final = 1e6
#: Seconds between two drawings of the table.
_DRAW_S: Final = 0.5


class Board:
    """Screens of several databases."""

    def __init__(self, names: Collection[str], *, as_json: bool) -> None:
        self._is_drawn = not as_json and sys.stderr.isatty()
        self._out = sys.stderr if as_json else sys.stdout
        self.screens = {name: Screen(as_json=as_json, database=name) for name in names}
        self._sizes: dict[str, int] = {}
        self._ends: dict[str, str] = {}

    def order(self, sizes: dict[str, int]) -> None:
        """Show the databases in this order, with their sizes."""
        self._sizes = sizes

    def ended(self, name: str, text: str) -> None:
        """Show the end of a database's migration."""
        self._ends[name] = text

    @contextmanager
    def of(self, name: str) -> Iterator[Screen]:
        """Take lines as a database's until the block ends."""
        with about(name):
            yield self.screens[name]

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Take all lines of this process, and draw the table, until the block ends."""
        if not self._is_drawn:
            with redirect_stdout(DatabaseLines(self._out)), redirect_stderr(DatabaseLines(sys.stderr)):
                yield
            return
        from rich.console import Console  # noqa: PLC0415  a tenth of a second, not needed without a terminal
        from rich.live import Live  # noqa: PLC0415

        out = sys.stdout
        # By the stream itself, because the name `sys.stderr` means another one in the block.
        with Live(self._table(), console=Console(file=sys.stderr), auto_refresh=False, transient=True) as live:
            drawing = asyncio.create_task(self._draw(live), name="migrate-table")
            try:
                # Rich has put its own streams there, which write above the table.
                lines = DatabaseLines(sys.stdout if out.isatty() else out)
                with redirect_stdout(lines), redirect_stderr(DatabaseLines(sys.stderr)):
                    yield
            finally:
                await end_tasks([drawing])

    async def _draw(self, live: Live) -> None:
        while True:
            live.update(self._table(), refresh=True)
            await asyncio.sleep(_DRAW_S)

    def _table(self) -> Table:
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=None, pad_edge=False)
        for heading, justify in (("database", "left"), ("MB", "right"), ("step", "left"), ("done", "right"),
                                 ("left", "right")):  # fmt: skip
            table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for name, size_bytes in self._sizes.items():
            cells = self._cells(name)
            table.add_row(*[Text(cell) for cell in (printable(name), f"{size_bytes / _MEGABYTE:,.0f}", *cells)])
        return table

    def _cells(self, name: str) -> tuple[str, str, str]:
        if name in self._ends:
            return printable(self._ends[name]), "", ""
        screen = self.screens[name]
        step, state = screen.latest
        if not step:
            return "waits", "", ""
        far = screen.how_far() if state != "done" else None
        if far is None:
            return f"{step} {'' if state in {'begun', 'running'} else state}", "", ""
        share = f"{far.done / far.total:.0%}" if far.total else f"{far.done:,} {far.unit}"
        return step, share, "" if far.left_s is None else brief(far.left_s)


class Member(NamedTuple):
    """One database."""

    config: Config
    options: MigrateOptions


class Ended(NamedTuple):
    """The end of one database's migration."""

    exit_code: int
    said: str
    error: ParapplyError | None = None
    size_bytes: int = 0
    #: All its steps up to the daemon are done.
    is_complete: bool = False
    #: Of a dry run: the steps that are left.
    steps: tuple[MigrationStep, ...] | None = None

    def report(self) -> dict[str, Any]:
        """Return its figures for programs."""
        steps = {} if self.steps is None else {"steps": list(self.steps)}
        return {"size_bytes": self.size_bytes, "result": self.said, **steps}


class Servers(NamedTuple):
    """Objects that are missing on a target's server, of a dry run."""

    roles: list[str]
    tablespaces: list[str]
    databases: list[str]


async def migrate(members: Mapping[str, Member], *, is_dry: bool) -> tuple[dict[str, Ended], list[Servers]]:
    """Migrate all databases up to the step before the daemon, and return the end of each."""
    return await _Several(members).run(is_dry=is_dry)


class _Several:
    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = {
            # The endpoint is of a single database.
            name: Member(replace(one.config, metrics=MetricsConfig()), one.options)
            for name, one in members.items()
        }
        self._options = next(iter(members.values())).options
        self._board = Board(list(members), as_json=self._options.as_json)
        self._facts: dict[str, instance.DatabaseFacts] = {}
        self._ended: dict[str, Ended] = {}
        self._missing: list[Servers] = []

    async def run(self, *, is_dry: bool) -> tuple[dict[str, Ended], list[Servers]]:
        async with self._board.shown():
            for name in self._members:
                async with self._outcome(name):
                    self._facts[name] = await self._look(self._members[name].config)
            for names in self._by_servers():
                await self._of_servers(names, is_dry=is_dry)
            order = sorted(self._facts.keys() - self._ended, key=lambda name: (-self._facts[name].size_bytes, name))
            self._board.order({name: self._facts[name].size_bytes for name in order})
            places = Places(self._options.jobs, self._options.max_bytes_per_s)
            # As many as connections, because the snapshot of a database that waits for one would age.
            room = asyncio.Semaphore(self._options.jobs)
            async with asyncio.TaskGroup() as group:
                for rank, name in enumerate(order):
                    doing = self._begin(name, None if is_dry else Access(places, rank), room)
                    group.create_task(doing, name=f"of-{rank}")
        return {name: self._ended[name] for name in self._members}, self._missing

    def _by_servers(self) -> Iterator[list[str]]:
        found = defaultdict(list)
        for name in self._facts:
            config = self._members[name].config
            ends = [with_database(login.dsn, _OUTSIDE) for login in (config.source.login, config.target.login)]
            found[tuple(ends)].append(name)
        yield from found.values()

    @asynccontextmanager
    async def _outcome(self, *names: str) -> AsyncIterator[None]:
        try:
            yield
        except ParapplyError as error:
            for name in names:
                self._end(name, Ended(error.exit_code, "failed", error))

    def _end(self, name: str, ended: Ended) -> None:
        facts = self._facts.get(name)
        self._ended[name] = ended._replace(size_bytes=facts.size_bytes if facts else 0)
        self._board.ended(name, ended.said)

    async def _look(self, config: Config) -> instance.DatabaseFacts:
        name = f"parapply migrate {config.source.slot}"
        conn = await slot.connect(config.source.login, application_name=name)
        async with conn:
            return await instance.look(conn)

    # -- once for all databases of two servers

    async def _of_servers(self, names: Sequence[str], *, is_dry: bool) -> None:
        async with self._outcome(*names), self._outside(self._members[names[0]].config) as ends:
            await instance.lock(ends.target)
            known = await instance.databases(ends.target)
            absent = [name for name in names if _name_there(self._members[name].config) not in known]
            spaces: list[instance.Tablespace] = []
            if self._options.choice.has_tablespaces:
                wanted = [self._facts[name] for name in names]
                spaces = await instance.missing_tablespaces(ends.target, wanted)
            if is_dry:
                made = await roles.missing(ends) if self._has_roles else []
                self._missing.append(Servers(made, [one.name for one in spaces], absent))
                return
            if self._has_roles:
                made_roles = await roles.bring(ends)
                click.echo(f"{len(made_roles.made)} roles made")
                roles.say(made_roles)
            if self._options.only is MigrationStep.ROLES:
                return
            for one in spaces:
                await instance.make_tablespace(ends.target, one, self._options.choice)
                click.echo(f"tablespace made: {printable(one.name)} in {printable(one.location)}")
            for name in absent:
                with self._board.of(name):
                    async with self._outcome(name):
                        await self._make(ends.target, name)

    @property
    def _has_roles(self) -> bool:
        return self._options.has_roles or self._options.only is MigrationStep.ROLES

    @asynccontextmanager
    async def _outside(self, config: Config) -> AsyncIterator[Connections]:
        """Open a session in a database of the publisher, and one on the target outside of the databases."""
        login = config.target.login
        there = Login(with_database(login.dsn, _OUTSIDE), login.command)
        name = f"parapply migrate {config.source.slot}"
        source = await slot.connect(config.source.login, application_name=name)
        async with source:
            # No rows are written, so triggers and rules need not be kept from them.
            target = await settings.connect_control(there, role="origin", application_name=name)
            async with target:
                yield Connections(source, target)

    async def _make(self, target: settings.Connection, name: str) -> None:
        facts, there = self._facts[name], _name_there(self._members[name].config)
        left_out = await instance.make_database(target, there, facts, self._options.choice)
        click.echo(printable(f"database made: {facts.words()}"))
        for one in left_out:
            click.echo(printable(f"setting left out: {one}"), err=True)

    # -- each database

    async def _begin(self, name: str, access: Access | None, room: asyncio.Semaphore) -> None:
        async with room:
            await (self._plan(name) if access is None else self._one(name, access))

    async def _one(self, name: str, access: Access) -> None:
        member = self._members[name]
        if self._options.only is MigrationStep.ROLES:
            self._end(name, Ended(0, "roles: done"))
            return
        last = member.options.last or MigrationStep.VIEWS
        options = replace(member.options, has_roles=False, last=last)
        with self._board.of(name) as screen:
            async with self._outcome(name):
                code = await command.run(member.config, options, screen, access)
                step, state = screen.latest
                said = f"{step}: {state}" if step else "all steps are done"
                is_complete = not code and options.only is None and options.last is MigrationStep.VIEWS
                self._end(name, Ended(code, said, is_complete=is_complete))
            if error := self._ended[name].error:
                click.echo(f"failed: {redact_text(error.line())}", err=True)

    async def _plan(self, name: str) -> None:
        config, is_new = self._members[name].config, any(name in one.databases for one in self._missing)
        async with self._outcome(name):
            known: dict[str, StepRow] = {}
            if not is_new:
                known = await steps_of(config)
            steps = [step for step in MigrationStep if step not in known or known[step].state != "done"]
            steps = [step for step in steps if step not in {MigrationStep.ROLES, MigrationStep.FOLLOW}]
            would = f"would run {', '.join(steps)}" if steps else "all steps are done"
            made = f"would be made ({self._facts[name].words()}); " if is_new else ""
            self._end(name, Ended(0, f"{made}{would}", steps=tuple(steps)))


def _name_there(config: Config) -> str:
    parameters = conninfo_to_dict(config.target.login.dsn)
    name = parameters.get("dbname")
    if not isinstance(name, str):
        raise TargetRefused("target: target.dsn names no database", hint="write dbname into target.dsn")
    return name


def databases_line(names: Sequence[str]) -> str:
    """Return the line of a configuration that names databases."""
    return f"{DATABASES} = [{', '.join(map(toml_string, names))}]"


def listed(path: Path) -> list[str]:
    """Return the databases in a file that `write_run_config` has written; none if no such file exists.

    Raises:
        ConfigError: the file cannot be read, or is another one.
    """
    try:
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        names = tomllib.loads(first).get(DATABASES) if first.startswith(f"{DATABASES} = [") else None
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"--run-config: {path}: {error}", hint="name another file") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"--run-config: {path} is no file of this command", hint="name another file, or remove it")
    return names


def write_run_config(path: Path, names: Sequence[str], template: Path | None) -> None:
    """Write the template with the databases, and those that the file has already.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    names = list(dict.fromkeys([*listed(path), *names]))
    new = path.with_name(f"{path.name}.new")
    try:
        shared = template.read_text(encoding="utf-8") if template is not None else ""
        new.unlink(missing_ok=True)
        # The template may hold a password, so neither a file nor a link of another user is taken.
        new.touch(mode=0o600, exist_ok=False)
        new.write_text(f"{databases_line(names)}\n{shared}", encoding="utf-8")
        if template is not None:
            new.chmod(template.stat().st_mode & 0o777)
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"--run-config: {error.filename}: {error.strerror}", hint="name another file") from error
