"""Intake of transactions in which the publisher has run commands that are also to run on the target.

A worker gets such a transaction in pieces, like a large one, and alone: everything earlier has committed before it, and
nothing later is even looked up before it has, because the facts about the target's tables no longer hold.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from parapply.errors import StreamLeft, TargetRefused
from parapply.plan.commands import CommandPolicy, CommandVerdict
from parapply.wire.messages import BeginPrepare, Prepare, StreamPrepare

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parapply.config import DdlConfig
    from parapply.model import Relation, Transaction
    from parapply.plan.commands import JudgedFrames
    from parapply.runtime.intake.batcher import Admission


_ALTER_SCHEMA: Final = "ALTER SCHEMA"


class AfterTransactions(Protocol):
    """Runs commands outside of transactions."""

    def call(self) -> None:
        """Note that a transaction with such a command has committed."""

    async def settled(self) -> None:
        """Wait until none is under way."""


class CommandTransactions:
    """Used by intake's task; the worker pool's callback sets `moved`."""

    def __init__(
        self, admission: Admission, later: AfterTransactions, config: DdlConfig, *, announces_renamed: bool
    ) -> None:
        """Start inside no such transaction.

        Args:
            admission: rules of entry; its batcher hands such a transaction over.
            later: runs commands that cannot run in a transaction.
            config: which commands run here.
            announces_renamed: the publisher announces the tables of a schema again that was renamed; from 16 on.
        """
        self._policy = CommandPolicy(config.apply, config.skip, config.tags)
        self._later = later
        self._has_later = False
        self._announces_renamed = announces_renamed
        #: A schema may have another name, which the stream will not say.
        self._is_outdated = False
        self._admission = admission
        self._batcher = batcher = admission.batcher
        self._reader = batcher.reader
        self._tables = batcher.tables
        self._pool = batcher.pool
        #: Set by intake when a batch may have committed.
        self.moved = asyncio.Event()
        self._is_inside = False
        #: Announced in the transaction, from its first piece with a command on.
        self._relations: list[Relation] = []

    def takes(self, transaction: Transaction) -> bool:
        """Return whether a transaction, or piece, is to be given to `take`."""
        return transaction.has_ddl or self._is_inside

    async def take(self, transaction: Transaction) -> None:
        """Hand a transaction or piece over; after the last one, return when it has committed.

        Raises:
            TargetRefused: it ends with PREPARE.
            SourceRefused, SourceLost, TargetLost: an end cannot be asked.
        """
        admission = self._admission
        if admission.is_done(transaction):
            await admission.announce(_last(transaction.relations))
            return
        check_not_prepared(transaction.event)
        commands = await self.judged(transaction.changes)
        await self.before(transaction.relations)
        self._relations += transaction.relations
        if admission.starts.apart:
            transaction = await admission.without_skipped(transaction)
        self._is_inside = True
        await self._batcher.add_piece(transaction, commands)
        if transaction.is_last:
            relations, self._relations, self._is_inside = self._relations, [], False
            await self.after(relations)

    async def judged(self, changes: Iterable[bytes | Relation]) -> JudgedFrames:
        """Return the commands among changes with their verdicts, and join the tables that the commands make here.

        The publications have such a table from its first row on. A table that a command makes there only is a new one
        like any other, because it may hold rows here.

        Args:
            changes: of a transaction that holds commands, before `before`.

        Raises:
            ProtocolError: a command cannot be read.
            TargetRefused, TargetLost: it could not be noted.
        """
        found = self._policy.judged_frames(changes, self._reader.queue)
        for one in found.values():
            if one is not None and one.verdict is not CommandVerdict.SKIP:
                await self._admission.copied.note_made(one.command.made)
                self._has_later = self._has_later or one.verdict is CommandVerdict.LATER
            if one is not None and one.command.tag == _ALTER_SCHEMA and not self._announces_renamed:
                self._is_outdated = True
        return found

    async def before(self, relations: Sequence[Relation]) -> None:
        """Decide from where on tables are applied that commands of the same transaction may make.

        Earlier commands that run outside of transactions also come first: this transaction's may need their results.

        Raises:
            SourceRefused, SourceLost, TargetRefused, TargetLost: an end cannot be asked.
        """
        self._batcher.close_open()
        self._reader.stop()
        with self._reader.waiting("a command that runs outside of transactions"):
            await self._later.settled()
        await self._admission.settle_made(relations)

    async def after(self, relations: Sequence[Relation]) -> None:
        """Wait until the transaction has committed, read all tables again, and put its relations in force.

        Raises:
            SourceRefused, SourceLost, TargetRefused, TargetLost: an end cannot be asked.
            StreamLeft: only a new stream has the names of the tables.
        """
        self._reader.stop()
        with self._reader.waiting("commands of the publisher"):
            while self._pool.flight.state.jobs:
                self.moved.clear()
                await self.moved.wait()
            if self._is_outdated:
                raise StreamLeft("The stream is left because it does not name the tables of a renamed schema.")
            if self._has_later:
                self._has_later = False
                self._later.call()
            await self._tables.read_all_again()
        await self._admission.announce(_last(relations))


def check_not_prepared(event: object) -> None:
    """Refuse commands in a prepared transaction: their effect could not be seen before its outcome.

    The queue's trigger keeps the publisher from preparing one.

    Raises:
        TargetRefused: it ends with PREPARE.
    """
    if isinstance(event, BeginPrepare | Prepare | StreamPrepare):
        raise TargetRefused(
            "a prepared transaction of the publisher holds commands to be run here, which is not possible",
            hint="the trigger of parapply.ddl_queue on the publisher was changed: run `parapply init --ddl` again",
        )


def _last(relations: Sequence[Relation]) -> list[Relation]:
    """Return the last announcement of each table, because a command may have made the one before untrue."""
    return list({relation.oid: relation for relation in relations}.values())
