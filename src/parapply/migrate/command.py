"""`parapply migrate`: all steps of a migration up to the cut-over, each done once, in their order.

In: the configuration and options. Out: a target that follows. The target has a note of each step, so a command that
was killed goes on with the same command: steps that are done are left out, and the step that was under way is resumed.

Foreign keys come after the rows of all tables are of one moment. A copy that was interrupted has tables of several;
then the stream is applied first, up to an LSN after the last of them, and the daemon ends there. So no foreign key is
checked against a state that the publisher never had.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import click
import msgspec
from psycopg import sql
from psycopg.errors import InsufficientPrivilege

from parapply import connect, failpoints
from parapply import init as beginning
from parapply.amounts import few
from parapply.check.kinds import Code
from parapply.copy import command as copying
from parapply.copy import schema as schemas
from parapply.copy import sequences
from parapply.copy.places import Access, Places
from parapply.copy.published import published_tables, schema_only_tables
from parapply.errors import ConfigError, ParapplyError, TargetRefused
from parapply.logs import redact_text
from parapply.migrate import follow, later, look, rest, roles
from parapply.migrate.noting import Noter
from parapply.migrate.options import Choice, check_patterns
from parapply.migrate.script import without_grants_to, without_system_grants
from parapply.migrate.show import Screen, migration_of
from parapply.model import format_lsn, parse_lsn
from parapply.printable import printable
from parapply.sequences import SequenceOptions
from parapply.source import ddl_queue, refusals, slot
from parapply.target.session import settings
from parapply.target.state import commands, copies, copy_parts, cutovers, migrations
from parapply.target.state import slots as state
from parapply.vocabulary import CopyState, MigrationStep
from parapply.wire.ddl_queue import CommandName

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from parapply.config import Config
    from parapply.copy.published import PublishedTable
    from parapply.migrate.options import MigrateOptions
    from parapply.migrate.script import Item, Script

#: Seconds to wait for the session of a command that was killed.
_LOCK_WAIT_S: Final = 30.0
_INCOMPLETE: Final = 1
#: Steps that take nothing from a target which has taken over.
_HARMLESS: Final = {MigrationStep.ROLES, MigrationStep.ANALYZE, MigrationStep.VIEWS}


def migrate(config: Config, options: MigrateOptions) -> int:
    """Run the steps that are left, and return the exit code.

    Raises:
        ParapplyError: a step has failed; the same command goes on with it.
    """
    screen = Screen(as_json=options.as_json)
    with screen.shown():
        return asyncio.run(run(config, options, screen, Access(Places(options.jobs, options.max_bytes_per_s))))


async def run(config: Config, options: MigrateOptions, screen: Screen, access: Access) -> int:
    """Do what `migrate` does in a loop that runs, with connections that it may share with other databases."""
    check_patterns([*options.choice.include, *options.choice.exclude])
    if not config.mapping.is_empty:
        raise ConfigError(
            "migrate makes the tables as they are on the publisher, and [mapping] says otherwise",
            hint="leave out [mapping], or make the tables by hand, then `parapply init --copy` and `parapply run`",
        )
    return await _Run(config, options, screen, access).run()


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The work that the step `schema` leaves to later ones, as of the moment of the schema."""

    later: str  # what follows the rows, as pg_dump has written it
    commands: tuple[CommandName, ...] | None  # of the publisher's queue; None: none are run here


class _Run:
    def __init__(self, config: Config, options: MigrateOptions, screen: Screen, access: Access) -> None:
        self._config = config
        self._options = options
        self._screen = screen
        self._access = access
        self._choice = options.choice
        self._login = config.source.login
        self._code = 0
        self._does: dict[MigrationStep, Callable[[], Awaitable[str]]] = {
            MigrationStep.ROLES: self._roles,
            MigrationStep.SCHEMA: self._schema,
            MigrationStep.COPY: self._copy,
            MigrationStep.INDEXES: self._indexes,
            MigrationStep.CATCH_UP: self._catch_up,
            MigrationStep.CONSTRAINTS: self._constraints,
            MigrationStep.LARGE_OBJECTS: self._large_objects,
            MigrationStep.UNLOGGED: self._unlogged,
            MigrationStep.SEQUENCES: self._sequences,
            MigrationStep.ANALYZE: self._analyze,
            MigrationStep.VIEWS: self._views,
            MigrationStep.FOLLOW: self._follow,
        }

    async def run(self) -> int:
        async with connect.open_both(self._config, "migrate") as ends:
            self._ends = ends
            self._facts = await slot.inspect(ends.source, self._config.source.slot)
            refusals.check_primary(self._facts, "`parapply migrate`")
            self._migration = migration_of(self._config, self._facts)
            await migrations.lock(ends.target, self._migration, _LOCK_WAIT_S)
            await state.has_schema(ends.target, self._config.target.state_schema)  # refuses another version
            # Only now, because another command's notes are its own.
            self._noter = Noter(self._config, self._migration, self._screen)
            async with self._noter:
                await self._steps()
        return self._code

    async def _steps(self) -> None:
        known = await migrations.load(self._ends.target, self._migration)
        await self._keep_choice(known.get(MigrationStep.CHECK))
        check = known.get(MigrationStep.CHECK)
        if (
            check is None
            # Killed before it was noted as done.
            or check.state != "done"
            or self._options.only is MigrationStep.CHECK
            or self._options.first is MigrationStep.CHECK
        ):
            await self._check(is_first=not known.keys() - {MigrationStep.CHECK, MigrationStep.ROLES})
        for step in self._wanted(known):
            await self._do(step)

    async def _check_not_cut_over(self) -> None:
        """Refuse to write to a target that clients write to, because their rows would go."""
        config, target = self._config, self._ends.target
        await connect.check_back(config, self._ends.source, self._facts)
        found = await connect.known_state(config, target, self._facts.system_identifier)
        if found is not None:
            await cutovers.check_may_write(target, config.target.state_schema, found.slot_id, config.source.slot)

    async def _keep_choice(self, row: migrations.StepRow | None) -> None:
        """Go on with the tables and objects that the migration was begun with."""
        if row is None or not row.options:
            return
        kept = msgspec.json.decode(row.options.encode(), type=Choice)
        if self._choice not in {Choice(), kept}:
            raise ConfigError(
                "the migration was begun with other options: "
                + (kept.words() or "none of --include, --exclude and such"),
                hint="leave these options out, and it goes on; or `parapply drop`, empty the target and begin again",
            )
        self._choice = kept

    def _wanted(self, known: dict[str, migrations.StepRow]) -> list[MigrationStep]:
        options = self._options
        if options.only is not None:
            return [] if options.only is MigrationStep.CHECK else [options.only]
        steps = [step for step in self._does if step is not MigrationStep.ROLES or options.has_roles]
        if options.last is not None:
            steps = [step for step in steps if not options.last.is_before(step)]
        if options.first is not None:
            return steps[steps.index(options.first) :] if options.first in steps else steps
        done = {step for step, row in known.items() if row.state == "done"}
        # The last one is never over: the daemon may be gone.
        return [step for step in steps if step not in done or step is MigrationStep.FOLLOW]

    async def _do(self, step: MigrationStep) -> None:
        target = self._ends.target
        if step not in _HARMLESS:
            await self._check_not_cut_over()
        await migrations.begin(target, self._migration, step)
        self._noter.begin(step)
        failpoints.probe(failpoints.MIGRATE_BEGUN)
        self._screen.said(step, "begun")
        try:
            detail = await self._does[step]()
        except ParapplyError as error:
            await self._noter.end()
            if not target.closed:
                try:
                    await migrations.end(target, self._migration, step, redact_text(str(error)), is_done=False)
                except ParapplyError:
                    # The first error is the news, and a step without an end is one that was interrupted.
                    self._screen.said(step, "failed, which could not be noted")
            raise
        await self._noter.end()
        failpoints.probe(failpoints.MIGRATE_DONE)
        await migrations.end(target, self._migration, step, detail, is_done=True)
        self._screen.said(step, "done", detail)

    # -- before anything is made

    async def _check(self, *, is_first: bool) -> None:
        """Look at both ends; note the choice only if nothing is refused."""
        self._noter.begin(MigrationStep.CHECK)
        program = self._pg_dump()
        await schemas.check_version(program, self._facts.server_version_num)
        copy = msgspec.structs.replace(self._copy_options(), brings_roles=self._options.has_roles)
        if is_first:
            copy = msgspec.structs.replace(copy, brings_schema=True)
        known = await connect.known_state(self._config, self._ends.target, self._facts.system_identifier)
        if known is None:
            tables = await beginning.look_first(self._config, copy, self._ends, self._facts, self._options.despite)
        else:
            tables = await published_tables(self._ends.source, self._config.source.publications, self._config.mapping)
        sight = await self._see(tables)
        refused = look.refusals(self._ends, sight, self._choice, has_roles=self._options.has_roles)
        errors = [error async for error in refused]
        if is_first and self._choice.large_objects == "copy":
            errors = [*await rest.large_objects_of_others(self._ends.target), *errors]
        connect.raise_all(errors)
        if unset := await look.settings_left(self._ends.target, sight):
            names = ", ".join(unset)
            click.echo(printable(f"not brought over: settings of the database (ALTER DATABASE ... SET): {names}"))
        has_grants = self._choice.has_privileges and not self._options.has_roles
        if has_grants and (reader := await look.unneeded_reader(self._ends.target, sight)):
            click.echo(
                printable(f"not brought over: privileges of {reader}, by which parapply reads, and which is not here")
            )
        await state.ensure_schema(self._ends.target, self._config.target.state_schema)
        kept = msgspec.json.encode(self._choice).decode()
        await migrations.begin(self._ends.target, self._migration, MigrationStep.CHECK, kept)
        detail = f"{len(tables):,} tables, {len(sight.left_out):,} left out"
        if sight.schema_only:
            detail += f", {len(sight.schema_only):,} schema only: {', '.join(map('.'.join, sight.schema_only))}"
        await self._noter.end()
        await migrations.end(self._ends.target, self._migration, MigrationStep.CHECK, detail, is_done=True)
        self._screen.said(MigrationStep.CHECK, "done", detail)

    async def _see(self, tables: Sequence[PublishedTable]) -> look.Sight:
        schema_only = await schema_only_tables(
            self._ends.source, self._config.source.publications, self._config.mapping
        )
        return await look.see(self._ends.source, self._choice, tables, self._own_schemas(), schema_only)

    async def _sight(self) -> look.Sight:
        return await self._see(
            await published_tables(self._ends.source, self._config.source.publications, self._config.mapping)
        )

    def _own_schemas(self) -> list[str]:
        return sorted({self._config.target.state_schema, *self._facts.state_schemas})

    def _pg_dump(self) -> str:
        folder = self._options.pg_bin
        return schemas.find_pg_dump(None if folder is None else str(folder / "pg_dump"))

    async def _dump(self, section: str, *options: str) -> bytes:
        choice, sight = self._choice, await self._sight()
        program = self._pg_dump()
        await schemas.check_version(program, self._facts.server_version_num)
        script = await schemas.dump(
            program,
            self._login,
            without=self._own_schemas(),
            options=[
                f"--section={section}",
                *options,
                *([] if choice.has_owners else ["--no-owner"]),
                *([] if choice.has_privileges else ["--no-privileges"]),
                *([] if choice.has_tablespaces else ["--no-tablespaces"]),
                *schemas.without_tables(sight.left_out),
            ],
        )
        reader = await look.unneeded_reader(self._ends.target, sight)
        if not reader:
            return script
        try:
            return without_grants_to(script.decode(), reader).encode()
        except ValueError as error:
            raise schemas.unknown(error) from error

    # -- the steps; each returns what it has done in a few words

    async def _roles(self) -> str:
        made = await roles.bring(self._ends)
        roles.say(made)
        if Code.DDL_ROLE.text not in self._options.despite:
            # The check has left it to this step.
            await connect.check_ddl_role(self._config, self._ends.target)
        return f"{len(made.made)} roles made"

    async def _schema(self) -> str:
        # Again: days may lie between the check and this, and a table without a publication would come without rows.
        connect.raise_all(list(look.of_tables(await self._sight())))
        target, source = self._ends.target, self._ends.source
        # Both of one moment, and the later one kept: what comes to the schema from now on is not brought in two ways.
        with slot.source_errors("exporting a snapshot"):
            async with source.transaction():
                await source.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                cursor = await source.execute("SELECT pg_catalog.pg_export_snapshot()")
                row = await cursor.fetchone()
                assert row is not None
                has_queue = await ddl_queue.is_published(source, self._config.source.publications)
                brought = await ddl_queue.names(source) if self._config.ddl.apply and has_queue else None
                script, n_left_out = await self._without_system_grants(
                    await self._dump("pre-data", f"--snapshot={row[0]}")
                )
                after = await self._dump("post-data", f"--snapshot={row[0]}")
        with settings.target_errors("making the schema"):
            # Noted in the same transaction: the schema cannot be made twice.
            async with target.transaction():
                if _SCHEMA_ITEM in await migrations.items(target, self._migration):
                    return "was made"
                await schemas.make(target, script, is_migration=True)
                await migrations.add_item(target, self._migration, _SCHEMA_ITEM)
                await self._default_privileges(later.read(after))
                kept = _Kept(later=after.decode(), commands=None if brought is None else tuple(sorted(brought)))
                text = msgspec.json.encode(kept).decode()
                await migrations.keep(target, self._migration, MigrationStep.SCHEMA, text)
        left_out = f", {n_left_out:,} GRANT and REVOKE left out" if n_left_out else ""
        return f"{len(script):,} bytes of SQL{left_out}"

    async def _default_privileges(self, after: Script) -> None:
        """Give tables that come by the stream from now on the publisher's default privileges; pg_dump has them last.

        Nothing that the schema has made gets others.
        """
        target, left_out = self._ends.target, []
        for item in after.default_privileges:
            try:
                with settings.target_errors(f"making {item.title}"):
                    async with target.transaction():
                        await target.execute(item.text.encode())
            except TargetRefused as error:
                if not isinstance(error.__cause__, InsufficientPrivilege):
                    raise
                left_out += item.text.splitlines()
            # Also of what is left out: the step `constraints` could not make it either.
            await migrations.add_item(target, self._migration, item.digest)
        if left_out:
            click.echo(printable(f"schema: left out, needs their role: {' '.join(left_out)}"), err=True)

    async def _without_system_grants(self, script: bytes) -> tuple[bytes, int]:
        """Leave out, name and count what no role but a superuser can give; `schema` would end there."""
        with settings.target_errors("reading the role"):
            query = sql.SQL("SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = CURRENT_USER")
            ((is_superuser,),) = await settings.rows(self._ends.target, query)
        if is_superuser:
            return script, 0
        try:
            text, left_out = without_system_grants(script.decode())
        except ValueError as error:
            raise schemas.unknown(error) from error
        if left_out:
            texts = "; ".join(left_out)
            click.echo(printable(f"schema: left out, as only a superuser of the target can run it: {texts}"), err=True)
        return text.encode(), len(left_out)

    def _copy_options(self, rows_before: int = 0) -> copying.CopyOptions:
        return copying.CopyOptions(
            connections=self._options.jobs,
            access=self._access,
            truncates=self._options.truncates,
            on_progress=self._screen.copying(MigrationStep.COPY, rows_before),
        )

    async def _copy(self) -> str:
        config, ends = self._config, self._ends
        found = await connect.known_state(config, ends.target, self._facts.system_identifier)
        if found is None:
            tables = await published_tables(ends.source, config.source.publications, config.mapping)
            facts = await slot.inspect(ends.source, config.source.slot)
            kept = await self._kept()
            # With --from the operator has seen to what came since.
            brought = None if kept is None or self._options.first is MigrationStep.COPY else kept.commands
            async with self._access.kept():
                await copying.begin(config, self._copy_options(), ends, facts, tables, brought)
        else:
            have_run = await self._run_commands(found.slot_id)
            rows_before = await self._rows_before(found.slot_id)
            async with self._access.kept():
                await copying.go_on(config, self._copy_options(rows_before), ends, found, have_run)
        known = await copies.load(ends.target, config.target.state_schema, (await self._state()).slot_id)
        n_rows = sum(row.rows or 0 for row in known.tables)
        size_bytes = sum(row.size_bytes or 0 for row in known.tables)
        self._screen.has_copied(n_rows)
        return f"{len(known.tables):,} tables, {n_rows:,} rows, {size_bytes:,} bytes"

    async def _rows_before(self, slot_id: int) -> int:
        schema = self._config.target.state_schema
        known = (await copies.load(self._ends.target, schema, slot_id)).tables
        complete = [row for row in known if row.state == CopyState.COPIED]
        oids = {row.source_oid for row in complete}
        parts = await copy_parts.load(self._ends.target, schema, slot_id)
        return sum(row.rows or 0 for row in complete) + sum(one.rows for one in parts if one.source_oid not in oids)

    async def _state(self) -> state.SlotState:
        found = await connect.known_state(self._config, self._ends.target, self._facts.system_identifier)
        if found is None:
            raise TargetRefused(
                f"the target knows nothing of slot {self._config.source.slot!r}", hint="`parapply migrate --from copy`"
            )
        return found

    async def _indexes(self) -> str:
        return await self._later(MigrationStep.INDEXES, lambda script: script.before_foreign_keys)

    async def _constraints(self) -> str:
        found = await self._state()
        known = await copies.load(self._ends.target, self._config.target.state_schema, found.slot_id)
        if paused := [row.name for row in known.tables if row.is_paused]:
            raise TargetRefused(
                f"target: foreign keys cannot be checked while tables are paused: {look.few(paused)}",
                hint=f"`parapply resume` copies them; then `parapply migrate --only {MigrationStep.CATCH_UP}`",
            )
        if not known.is_settled(found.low_lsn):
            raise TargetRefused(
                "target: the tables' rows are of different moments, so foreign keys cannot be checked",
                hint=f"`parapply migrate --only {MigrationStep.CATCH_UP}` first",
            )
        # All: `indexes` may have been left out.
        done = await self._later(MigrationStep.CONSTRAINTS, lambda script: script.items)
        kept = await self._kept()
        if kept is not None:
            before = {item.digest for item in later.read(kept.later.encode()).items}
            now = later.read(await self._dump("post-data")).items
            since = [item.title for item in now if item.digest not in before]
            if since:
                names = printable(", ".join(since))
                click.echo(
                    f"constraints: came to the publisher after its schema was brought, and not made by this step:"
                    f" {names}; parapply.replicate_ddl brings what it has run, the rest is yours to make",
                    err=True,
                )
        return done

    async def _kept(self) -> _Kept | None:
        """Return the work that the step `schema` has kept; None if the schema was made in another way."""
        row = (await migrations.load(self._ends.target, self._migration)).get(MigrationStep.SCHEMA)
        return msgspec.json.decode(row.options, type=_Kept) if row is not None and row.options else None

    async def _later(self, step: MigrationStep, choose: Callable[[Script], Sequence[Item]]) -> str:
        kept = await self._kept()
        script = later.read(await self._dump("post-data") if kept is None else kept.later.encode())
        items = choose(script)
        done = await migrations.items(self._ends.target, self._migration)
        left = [item for item in items if item.digest not in done]
        with self._screen.counting(step, len(left), "statements", len(items) - len(left)) as counter:
            await later.Later(self._config, self._migration, script, counter, self._access).run(left)
        return f"{len(left):,} statements" + (f", {len(items) - len(left):,} before" if len(left) < len(items) else "")

    async def _catch_up(self) -> str:
        found = await self._state()
        schema = self._config.target.state_schema
        known = await copies.load(self._ends.target, schema, found.slot_id)
        if left := [row.name for row in known.tables if row.state != "copied" and not row.reason]:
            raise TargetRefused(
                f"target: not copied yet: {look.few(left)}", hint=f"`parapply migrate --from {MigrationStep.COPY}`"
            )
        if known.is_settled(found.low_lsn):
            return "nothing to do: all rows are of one moment"
        return f"applied up to {await self._apply_until_now(MigrationStep.CATCH_UP, found.slot_id)}"

    async def _apply_until_now(self, step: MigrationStep, slot_id: int) -> str:
        with slot.source_errors("writing a message"):
            cursor = await self._ends.source.execute(
                "SELECT pg_catalog.pg_logical_emit_message(true, 'parapply migrate', '')"
            )
            row = await cursor.fetchone()
        assert row is not None
        lsn = parse_lsn(str(row[0]))
        async with self._noter.left_to_daemon():
            target, until = self._ends.target, ("--until", format_lsn(lsn))
            daemon = await follow.daemon_of(self._options, self._config, target, slot_id, *until)
            with self._screen.counting(step, 1, "bytes of WAL") as counter:
                while not await follow.reach(self._config, target, slot_id, daemon, lsn, counter):
                    if daemon.pid is not None:
                        raise ParapplyError(
                            f"the daemon was ended before it had applied up to {format_lsn(lsn)}",
                            hint="the same command starts it again",
                        )
                    daemon = await follow.daemon_of(self._options, self._config, target, slot_id, *until)
            await daemon.end(self._config, target, slot_id)
        return format_lsn(lsn)

    async def _run_commands(self, slot_id: int) -> frozenset[CommandName] | None:
        """Have the target's tables as the publisher's are, before more of them are copied; return what has run."""
        config, ends = self._config, self._ends
        if not config.ddl.apply or not await ddl_queue.is_published(ends.source, config.source.publications):
            return None
        found = await ddl_queue.names(ends.source)
        noted, _ = await commands.noted(ends.target, config.target.state_schema, slot_id)
        if not found <= noted:
            # Without its key no change of a table finds its row.
            await self._indexes()
            await self._apply_until_now(MigrationStep.COPY, slot_id)
        return found

    async def _large_objects(self) -> str:
        if self._choice.large_objects != "copy" and self._options.only is not MigrationStep.LARGE_OBJECTS:
            return "left out" if self._choice.large_objects == "skip" else "none"
        if _OBJECTS_ITEM not in await migrations.items(self._ends.target, self._migration):
            connect.raise_all(await rest.large_objects_of_others(self._ends.target))
            await migrations.add_item(self._ends.target, self._migration, _OBJECTS_ITEM)
        choice, n_there = self._choice, (await self._sight()).n_large_objects
        with self._screen.counting(MigrationStep.LARGE_OBJECTS, n_there, "objects") as counter:
            async with self._access.lane():
                n_objects, removed = await rest.large_objects(
                    self._ends,
                    counter,
                    self._access.limit,
                    has_owners=choice.has_owners,
                    has_privileges=choice.has_privileges,
                )
        gone = f", {len(removed):,} that only the target had removed: {few([*map(str, removed)])}" if removed else ""
        return f"{n_objects:,} as they are now: later changes do not follow{gone}"

    async def _unlogged(self) -> str:
        if self._choice.unlogged != "copy" and self._options.only is not MigrationStep.UNLOGGED:
            return "left out" if self._choice.unlogged == "skip" else "no rows"
        names = (await self._sight()).unlogged
        with self._screen.counting(MigrationStep.UNLOGGED, len(names), "tables") as counter:
            async with self._access.lane():
                n_tables = await rest.unlogged(self._ends, names, counter, self._access.limit)
        return f"{n_tables:,} tables as they are now: later changes do not follow"

    async def _sequences(self) -> str:
        code = await sequences.bring(self._config, SequenceOptions())
        if code:
            self._code = _INCOMPLETE
            return "some could not be set: see `parapply sequences`"
        return "as they are now: the cut-over sets them again"

    async def _analyze(self) -> str:
        sight = await self._sight()
        tables = [
            table.full_name
            for table in await published_tables(
                self._ends.source, self._config.source.publications, self._config.mapping
            )
        ]
        names = list(dict.fromkeys([*tables, *sight.unlogged]))
        with self._screen.counting(MigrationStep.ANALYZE, len(names), "tables") as counter:
            skipped = await rest.analyze(self._config, counter, self._access, names)
        for text in skipped:
            click.echo(printable(f"analyze: {text}"), err=True)
        return f"{len(names):,} tables" + (f", {len(skipped)} left out: see above" if skipped else "")

    async def _views(self) -> str:
        views = (await self._sight()).views
        with self._screen.counting(MigrationStep.VIEWS, len(views), "views") as counter:
            skipped = await rest.refresh_views(self._config, counter, self._access, views)
        for text in skipped:
            click.echo(printable(f"views: {text}"), err=True)
        return f"{len(views) - len(skipped):,} materialized views"

    async def _follow(self) -> str:
        config, options, target = self._config, self._options, self._ends.target
        found = await self._state()
        # For good: the daemon outlives this command.
        await self._noter.leave()
        daemon = await follow.daemon_of(options, config, target, found.slot_id)
        click.echo(
            "follow: a daemon runs already"
            if daemon.pid is None
            else f"follow: daemon started, process {daemon.pid}, log {options.daemon_log}"
        )
        with self._screen.counting(MigrationStep.FOLLOW, 0, "") as counter:
            lag_s = await follow.small_lag(config, target, found.slot_id, daemon, options.max_lag_s, counter)
            self._screen.said(
                MigrationStep.FOLLOW,
                "ready",
                f"lag {lag_s:.1f} s; next: parapply verify, then parapply cutover (docs/how-to/cut-over.md)",
            )
            if not options.is_waiting:
                return f"lag {lag_s:.1f} s; the daemon runs"
            ending = await follow.until_it_ends(config, target, found.slot_id, daemon, counter)
        return f"the daemon has ended: {ending}"


#: Named in the state as the schema that is made before the rows.
_SCHEMA_ITEM: Final = "schema before the rows"
#: The same for large objects from then on, all of which are the publisher's.
_OBJECTS_ITEM: Final = "large objects"
