"""`parapply seed`: a physical copy of the publisher becomes a target, and joins the slot at its exact LSN.

In: the configuration and options. Out: a state on the copy whose watermark is the end of the copy's recovery.

The way of the data:

1. `seed --prepare` makes the publication, and then the slot, on the publisher. The slot begins at L. It waits until
   every transaction that was open has ended, prepared ones too, so each one that ends behind L was begun when the slot
   already kept its WAL. The slot is made without two_phase.
2. The operator makes the copy by any means, and its recovery ends at E, behind the last record that was replayed
   (`joint.py`). A transaction is on the copy if and only if its commit record ends at E or before, so E is a watermark,
   and no other place in WAL is one for this copy.
3. `seed` looks first and changes nothing: the copy is of the publisher's cluster, its timelines are the
   publisher's up to E, the slot begins at E or before, nothing that came along acts (`came_along.py`), and no session
   has written to the published tables since. Then it makes the state schema, writes the slot's row with the watermark E
   and the marks of the publications as of E, both in one transaction, and ends what the operator has named. That comes
   last, because the server counts it as rows that a session wrote.
4. The daemon starts at E as after any stop: START_REPLICATION skips every transaction whose commit record lies before
   E, and sends every later one whole, since its first change lies behind the slot's beginning. So it is with a
   transaction that was in progress at E, however large. One that was prepared at E is on the copy as prepared. It is
   rolled back there and comes with its COMMIT PREPARED, also where the daemon has given the slot two_phase, because
   that begins at E, behind the PREPARE.

A kill before the row is written leaves a copy that the same command joins; after it the same command ends what is left.
Until the row exists neither `run` nor `init` takes the slot over, because the target has the publisher's identity
(`connect.adopt`).

The row is a table's and comes through `pg_upgrade`, which ends everything that says where the copy came from: join
first, upgrade then. Nothing here takes the system identifier for one server: copies have their publisher's.

Sequences on the copy may be up to 32 values ahead, because recovery brings what nextval has reserved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
import msgspec
import psycopg
from psycopg import sql

from parapply import connect, failpoints
from parapply.check.kinds import Code
from parapply.continuity import kept_without_copy
from parapply.copy.snapshot import tell_what_is_awaited
from parapply.errors import ConfigError, SlotLost, SourceRefused, TargetRefused
from parapply.init import check_despite, look_first
from parapply.model import format_lsn
from parapply.printable import printable
from parapply.quoting import shown
from parapply.seed import came_along, joint
from parapply.seed.came_along import CameAlong
from parapply.source import failover, refusals, slot, waits
from parapply.target.session import settings
from parapply.target.state import copies
from parapply.target.state import slots as state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.blocked import BlockedSession
    from parapply.config import Config

#: Of `--despite`: rows that were written since the recovery.
WRITES: Final = "writes"


class SeedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to join."""

    cleans: tuple[CameAlong, ...] = ()
    despite: tuple[str, ...] = ()  # kinds that stay, `WRITES`, and codes of arguable findings
    is_dry: bool = False


async def prepare(config: Config) -> None:
    """Make publication and slot for a copy that is still to be made; doing it again changes nothing.

    Raises:
        SourceRefused: the publication or the slot cannot be made, or is not as it must be.
        SlotBusy, SourceLost: a process reads the slot, or the connection broke.
    """
    _check_values(config)
    name, login = config.source.slot, config.source.login
    conn = await slot.connect(login, application_name=f"parapply seed {name}")
    async with conn, waits.looked_after(login, _say_waiting):
        facts = await slot.inspect(conn, name)
        refusals.check_server(facts)
        refusals.check_primary(facts, "seed --prepare")
        failover.check(config.source, facts)
        await _make_publication(conn, config)
        await slot.check_publications(conn, config.source.publications)
        if facts.slot is None:
            if error := await refusals.awaited(conn, config.source):
                raise error
            tell_what_is_awaited(conn)
            await slot.create_slot(conn, name)
            facts = await slot.inspect(conn, name)
        refusals.check_slot(facts, name, None, two_phase=config.source.two_phase)
        refusals.check_own_and_idle(facts)
        with slot.source_errors("asking for the end of its WAL"):
            cursor = await conn.execute(b"SELECT pg_catalog.pg_current_wal_insert_lsn()::text")
            ((lsn,),) = await cursor.fetchall()
            # A recovery ends at an LSN only with a record behind it, and an idle server writes none.
            await conn.execute(b"SELECT pg_catalog.pg_logical_emit_message(true, 'parapply seed', '')")
    assert facts.slot is not None
    click.echo(
        f"slot {name!r}: begins at {format_lsn(facts.slot.confirmed_flush_lsn or 0)}, and keeps WAL from now on\n"
        f"now make the copy; its recovery must end at {lsn} or later, by promotion or with recovery_target_lsn,\n"
        "recovery_target_action = 'promote' and max_logical_replication_workers = 0\n"
        "next: parapply seed, with the same options and the copy as target"
    )


def _check_values(config: Config) -> None:
    if config.mapping.withholding:
        raise ConfigError(
            "mapping: a physical copy has what `replace`, `omit` and schema_only keep from the target",
            hint="bring the rows with `parapply init --copy`",
        )


def _say_waiting(one: BlockedSession) -> None:
    click.echo(f"source: {one.line()}", err=True)


async def _make_publication(conn: slot.Connection, config: Config) -> None:
    """Make the publication, of all tables, if only one is configured and it is missing."""
    names = config.source.publications
    if len(names) != 1:
        return
    (name,) = names
    with slot.source_errors("making the publication"):
        cursor = await conn.execute("SELECT FROM pg_catalog.pg_publication WHERE pubname = %s", [name])
        if await cursor.fetchone() is not None:
            return
        query = sql.SQL("CREATE PUBLICATION {} FOR ALL TABLES").format(sql.Identifier(name))
        try:
            await conn.execute(query)
        except psycopg.errors.InsufficientPrivilege as error:
            raise SourceRefused(
                f"source: no publication {name!r} exists, and the role may not make one of all tables",
                hint=f"CREATE PUBLICATION {shown(name)} FOR TABLE ..., or FOR ALL TABLES as a superuser",
            ) from error
    click.echo(f"source: publication {name!r} made, for all tables")


async def seed(config: Config, options: SeedOptions) -> None:
    """Join a copy to the slot; doing it again changes nothing.

    Raise ConfigError if a code of `despite` is none, or columns are to be replaced; SourceRefused or SlotLost if the
    publisher or its slot cannot continue the copy; TargetRefused if the target is no copy that can be joined, or
    something on it is in the way; SourceLost or TargetLost if a connection broke; the same command goes on.
    """
    _check_values(config)
    check_despite("seed", options.despite, [WRITES, *came_along.ARGUABLE])
    name, schema = config.source.slot, config.target.state_schema
    async with await settings.connect_reader(config.target.login, f"parapply seed {name}") as reader:
        await joint.check_promoted(reader)
    async with connect.open_both(config, "seed") as ends:
        run = _Run(config, options, ends, await slot.inspect(ends.source, name))
        found = await connect.known_state(config, ends.target, run.facts.system_identifier)
        if found is None:
            await run.look()
            if options.is_dry:
                return
            await run.join()
        else:
            click.echo(f"slot {name!r}: exists and is applied up to {format_lsn(found.low_lsn)}; nothing to copy")
            _check_may_clean(options, found)
            if options.is_dry:
                return
        names = await came_along.found(ends.target, schema, name)
        for line in await came_along.clean(ends.target, schema, names, options.cleans):
            click.echo(line)
        failpoints.probe(failpoints.SEED_CLEANED)
    click.echo("next: parapply run, with the same options; then parapply verify --sampled 100")


def _check_may_clean(options: SeedOptions, found: state.SlotState) -> None:
    """Refuse to clean a target on which a daemon has worked: its slots and jobs may be newer."""
    if options.cleans and (found.recorded or found.has_forgotten):
        raise TargetRefused(
            f"target: a daemon has applied changes of slot {found.slot_name!r}, and objects may be newer than the copy",
            hint="run the command without --clean, and drop by hand what is not needed",
        )


class _Run:
    def __init__(
        self, config: Config, options: SeedOptions, ends: connect.Connections, facts: slot.SourceFacts
    ) -> None:
        self.facts = facts
        self._config = config
        self._options = options
        self._ends = ends
        self._name, self._schema = config.source.slot, config.target.state_schema
        self._lsn = 0
        self._marks: dict[int, str] = {}

    async def look(self) -> None:
        """Find where the copy joins, and refuse it if it cannot; change nothing."""
        config, ends = self._config, self._ends
        await connect.check_apart(config, ends, self.facts)
        await connect.check_back(config, ends.source, self.facts)
        self.facts = await refusals.with_timeline(ends.source, self.facts, config.source.login)
        place = await self._joint()
        self._lsn = place.lsn
        await self._check_slot(place)
        await _check_commits(ends.target)
        along = await came_along.found(ends.target, self._schema, self._name)
        self._check_prepared(along.get(CameAlong.PREPARED, []))
        self._marks = await came_along.marks(ends.target, config.source.publications)
        refused = came_along.refusals_of(along, self._options.cleans, self._options.despite)
        if WRITES not in self._options.despite:
            with slot.source_errors("asking since when it counts"):
                since = await came_along.counts_since(ends.source)
            with settings.target_errors("asking since when it counts"):
                has_others = since is not None and await came_along.counts_since(ends.target) == since
            if has_others:
                click.echo(
                    "target: sessions that have written here since the copy's recovery ended cannot be seen: its counts"
                    " are the publisher's"
                )
            else:
                refused += await came_along.check_untouched(ends.target, self._marks)
        connect.raise_all(refused)
        # The copy has all that a reader of the slot confirmed, because it ends later.
        await look_first(config, None, ends, self.facts, {*self._options.despite, Code.SLOT_READ.text})
        for line in [*await came_along.notes(ends.target), *await self._standby_slot()]:
            click.echo(line)
        click.echo(f"target: a copy of the publisher up to {format_lsn(place.lsn)} of timeline {place.timeline}")

    async def _joint(self) -> joint.Joint:
        copy = await joint.read_copy(self._ends.target)
        if copy.system_identifier != self.facts.system_identifier:
            raise TargetRefused(
                f"target: the server's system identifier is {copy.system_identifier}, the publisher's is"
                f" {self.facts.system_identifier}: it is no physical copy, or was upgraded since",
                hint="correct target.dsn; a copy joins before `pg_upgrade`; rows are copied by `parapply init --copy`",
            )
        history = await refusals.timeline_history(self._config.source.login, self.facts.timeline)
        return joint.joint(copy, self.facts.timeline, history)

    async def _check_slot(self, place: joint.Joint) -> None:
        """Refuse a slot that does not bring all that the copy lacks."""
        facts, name = self.facts, self._name
        if facts.slot is None:
            raise SourceRefused(
                f"slot {name!r} does not exist", hint="`parapply seed --prepare` makes it; then make the copy again"
            )
        refusals.check_own_and_idle(facts)
        begin = facts.slot.confirmed_flush_lsn or 0
        if begin > place.lsn:
            raise SlotLost(
                f"the copy ends at {format_lsn(place.lsn)}, and slot {name!r} begins at {format_lsn(begin)}: what was"
                " committed in between is missing on the copy",
                hint="make the copy again; its recovery must end after `parapply seed --prepare`",
            )
        known = refusals.KnownPosition(
            system_identifier=facts.system_identifier, timeline=place.timeline, low_lsn=place.lsn, high_lsn=place.lsn
        )
        two_phase = self._config.source.two_phase
        self.facts = await refusals.check(
            self._ends.source, facts, self._config.source.login, name, known, two_phase=two_phase
        )
        # Asked again behind the state, which is written by then.
        failover.check(self._config.source, self.facts)

    def _check_prepared(self, gids: Sequence[str]) -> None:
        """Refuse transactions prepared at the end of the copy of which the slot would send only the outcome."""
        assert self.facts.slot is not None
        if self.facts.slot.is_two_phase and gids:
            raise SourceRefused(
                f"slot {self._name!r} has two_phase already, and {len(gids)} transactions were prepared at the end of"
                f" the copy (the first is {gids[0]!r}): the slot would send only their outcome",
                hint="drop the slot, run `parapply seed --prepare`, which makes it without two_phase, and make the copy"
                " again",
            )

    async def _standby_slot(self) -> list[str]:
        """Return a line about the publisher's slot that the copy had as a standby, and needs no more."""
        query = sql.SQL("SELECT pg_catalog.current_setting('primary_slot_name')")
        with settings.target_errors("asking for its slot as a standby"):
            ((name,),) = await settings.rows(self._ends.target, query)
        there = await slot.read_slot(self._ends.source, name) if name else None
        if there is None or there.active_pid is not None:
            return []
        return [
            printable(
                f"source: slot {name!r}, which the copy had as a standby, still keeps WAL: drop it with"
                " pg_drop_replication_slot"
            )
        ]

    async def join(self) -> None:
        """Write the state."""
        config, target = self._config, self._ends.target
        async with connect.state_schema(target, self._schema):
            failpoints.probe(failpoints.SEED_SCHEMA)
            with settings.target_errors("noting where the copy joins"):
                async with target.transaction():
                    slot_id = await state.create(target, self._schema, connect.new_slot(config, self.facts, self._lsn))
                    await copies.keep_marks(target, self._schema, slot_id, kept_without_copy(self._marks))
        failpoints.probe(failpoints.SEED_JOINED)
        await failover.ensure(config.source, self.facts)
        click.echo(f"slot {self._name!r}: the copy joins at {format_lsn(self._lsn)}; no row is copied")


async def _check_commits(conn: settings.Connection) -> None:
    """Refuse a server whose commits would wait for standbys that it does not have: settings also come along."""
    query = sql.SQL(
        "SELECT pg_catalog.current_setting('synchronous_standby_names') WHERE NOT EXISTS"
        " (SELECT FROM pg_catalog.pg_stat_replication WHERE sync_state IN ('sync', 'quorum'))"
    )
    with settings.target_errors("asking for its standbys"):
        found = await settings.rows(conn, query)
    if found and found[0][0]:
        raise TargetRefused(
            f"target: synchronous_standby_names came along ({found[0][0]}), and no standby follows:"
            " each commit would wait",
            hint="ALTER SYSTEM SET synchronous_standby_names = '', then SELECT pg_reload_conf()",
        )
