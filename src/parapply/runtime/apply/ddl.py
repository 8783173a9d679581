"""Commands of the publisher, run on the target in their place: between the rows before and the rows after them.

Their transaction is applied in pieces at the head, with everything earlier committed and nothing later begun. Rows and
commands are one target transaction. After a command the tables of later rows are looked up inside that transaction,
because no other session sees what the command has done.
"""

from __future__ import annotations

import asyncio
import struct
from itertools import groupby
from typing import TYPE_CHECKING, Final, cast

import msgspec

from parapply.conflict.history import NO_CHARACTER
from parapply.driver import NAMING, condition
from parapply.engine.job import Attempts
from parapply.errors import ApplyFailed, StatementFailed, TargetLost
from parapply.logs import get_logger
from parapply.model import Relation, Transaction, format_lsn
from parapply.plan.commands import CommandVerdict
from parapply.runtime.apply.failure import FailureClass, classify, shown_end
from parapply.runtime.apply.pieces import Pieces
from parapply.runtime.apply.transaction import role_of
from parapply.target.session.pipeline import Statement
from parapply.vocabulary import CommandOutcome
from parapply.wire.rows import KIND_AT, RELATION_AT, TRUNCATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from parapply.engine.job import LargeJob, StreamJob
    from parapply.plan.commands import JudgedCommand, JudgedFrames
    from parapply.plan.table import TablePlan
    from parapply.runtime.apply.repair import PieceRepair
    from parapply.runtime.apply.transaction import CommandRules, WorkerKit
    from parapply.target.session.session import WorkerSession
    from parapply.wire.ddl_queue import QueuedCommand

_relation_at = struct.Struct(">I").unpack_from

#: Settings of the publisher's session under which a command also runs here, because they decide what its names and
#: literals mean.
_TAKEN: Final = (
    "search_path",
    "DateStyle",
    "IntervalStyle",
    "TimeZone",
    "standard_conforming_strings",
    "xmloption",
    "check_function_bodies",
)
#: Planner settings that workers are pinned to for their own statements, and that would make checks of a command slow.
_PLANNER: Final = ("enable_seqscan", "enable_hashjoin", "enable_mergejoin")
#: A command whose tag is another one once it has run.
_MADE_AND_FILLED: Final = ("CREATE MATERIALIZED VIEW", "SELECT")
#: A statement of the open transaction has failed before.
_ABORTED: Final = "25P02"
_SKIPPED: Final = "its transaction is skipped"
_LEFT_OUT_HINT: Final = "the target is as it was; run the command there by hand if its tables are replicated"


class CommandFailed(Exception):
    """A command cannot run here, or must not; it is undone."""

    def __init__(self, command: QueuedCommand, reason: str, hint: str) -> None:
        """Keep it for the report, which needs the end of the transaction."""
        super().__init__(reason)
        self.command = command
        self.reason = reason
        self.hint = hint


class PiecesWithCommands(Pieces):
    """Applies the pieces of one transaction in which commands may be, at the head."""

    def __init__(
        self, job: LargeJob | StreamJob, session: WorkerSession, kit: WorkerKit, repair: PieceRepair, commit_lsn: int
    ) -> None:
        """Apply nothing yet; see `Pieces`. The commit LSN is the transaction's."""
        super().__init__(job, session, kit, repair)
        self._piece_repair = repair
        self._commit_lsn = commit_lsn
        self._rules = kit.rules.commands
        #: True once a command has run; from then on tables are looked up in this transaction.
        self._has_run = False
        #: Looked up since the last command.
        self._fresh: set[Relation] = set()
        #: True once a piece with commands has come.
        self.has_commands = False
        #: Each command with its reason where it was left out.
        self.done: list[tuple[QueuedCommand, str]] = []

    async def add(self, piece: Transaction) -> None:
        """Apply a piece: its rows as `Pieces` does, each command when everything before it is executed.

        Raises:
            CommandFailed: a command cannot run.
            ConflictStop, DataFailed, RolledBack, TargetLost, TargetRefused, ProtocolError: as `Pieces.add`.
        """
        if not (piece.has_ddl or self._has_run):
            await super().add(piece)
            return
        self.has_commands = True
        self._pool.flight.count_out(piece.size_bytes)
        self._job.counts.n_transactions, self._job.counts.xids = 1, (piece.xid,)
        self._job.counts.size_bytes += piece.size_bytes
        for part in parts_of(piece, self._job.commands):
            if isinstance(part, Transaction):
                await self._look_up(part)
                await super().add(part)
            else:
                await self.settle()
                await self._command(part, self._piece_repair.end_of(piece))

    async def _look_up(self, part: Transaction) -> None:
        """Plan every relation of some changes by the tables as the open transaction has them."""
        if not self._has_run:
            await self._tables.resolve_streamed(part.relations)
            return
        await self.settle()
        used = dict.fromkeys(part.relations)
        announced = {relation.oid for relation in part.relations}
        for change in part.changes:
            if not isinstance(change, Relation) and change[KIND_AT] != TRUNCATE:
                oid = _relation_at(change, RELATION_AT)[0]
                plan = self.current.get(oid)
                if plan is not None and oid not in announced:
                    used[plan.relation] = None
        left = [relation for relation in used if relation not in self._fresh]
        await self._refresh(left)
        self._fresh.update(left)

    async def _refresh(self, relations: Iterable[Relation]) -> None:
        """Read the tables of relations again, as the open transaction has them: no other session sees what it did."""
        if not self._has_run:
            await super()._refresh(relations)
            return
        try:
            await self._tables.resolve_inside(relations, self._session.ask)
        except StatementFailed as failure:
            if failure.sqlstate == _ABORTED:
                return  # by a query about a conflict, whose own error is judged: it would come again each time
            raise TargetLost(f"target: tables could not be looked up after a command: {failure.sqlstate}") from failure

    async def _command(self, judged: JudgedCommand, end: Transaction) -> None:
        command, verdict, reason = judged
        if verdict is CommandVerdict.REFUSE:
            raise CommandFailed(
                command,
                reason,
                f"add {command.tag!r} to ddl.tags; or run the command here by hand, and set ddl.skip = "
                f"[{command.number}]",
            )
        if verdict is not CommandVerdict.SKIP:
            if verdict is CommandVerdict.RUN:
                await self._run(command, end)
                self._job.counts.commands.append(command.tag)
            self._has_run = True
            self._fresh.clear()
        await note(self._session, self._rules, command, self._commit_lsn, reason)
        self.done.append((command, reason))
        if reason:
            self._job.counts.n_left_out += 1

    async def _run(self, command: QueuedCommand, end: Transaction) -> None:
        attempts = Attempts(stops_on_error=True)
        role = role_of(self._rules.config, command)
        tag: bytes | None = None
        while tag is None:
            try:
                tag = await self._session.run_command(settings_of(command), role, command.schema, command.command)
            except StatementFailed as failure:
                await self._session.undo_piece()
                self._job.attempts += 1
                failed = CommandFailed(command, reason_of(failure), _hint(command))
                if classify(failure) is not FailureClass.AGAIN:
                    raise failed from failure
                self._piece_repair.check_wanted()
                await asyncio.sleep(attempts.again_s())
                self._piece_repair.tell_long(command_failed(failed, end, is_retried=True), attempts)
        self._piece_repair.succeeded()
        said = tag.decode().rstrip("0123456789 ")
        if said != command.tag and (command.tag, said) != _MADE_AND_FILLED:
            raise CommandFailed(command, f"the target took it for {said}", _hint(command))
        # Text that is prepared may have other types now (trap T-48).
        await self._session.forget_statements()


async def note(
    session: WorkerSession, rules: CommandRules, command: QueuedCommand, commit_lsn: int, reason: str
) -> None:
    """Note inside the open transaction that a command has run, or will later; with a reason, that it is left out.

    Its text is for people only then: characters that the target's encoding lacks, which may be the reason, become "?".
    """
    outcome = CommandOutcome.PENDING if command.is_later else CommandOutcome.APPLIED
    texts = (
        str(rules.slot_id),
        format_lsn(commit_lsn),
        str(command.number),
        command.tag,
        command.command,
        command.role_name,
        (CommandOutcome.LEFT_OUT if reason else outcome).value,
        reason,
        msgspec.json.encode(command.settings).decode(),
        command.schema,
    )
    try:
        try:
            await session.run([Statement(rules.note, [text.encode() for text in texts])], is_piece=True)
        except StatementFailed as failure:
            if not reason or failure.sqlstate != NO_CHARACTER:
                raise
            await session.undo_piece()
            await session.run([Statement(rules.note, [text.encode("ascii", "replace") for text in texts])])
    except StatementFailed as failure:
        raise TargetLost(f"target: a command could not be noted: {failure.sqlstate}") from failure


def log_done(done: Iterable[tuple[QueuedCommand, str]], end: Transaction) -> None:
    """Log the outcome of commands whose transaction has committed."""
    log = get_logger()
    xid, end_lsn = end.xid, format_lsn(end.end_lsn)
    for command, reason in done:
        tag, number = command.tag, command.number
        if reason:
            hint = _LEFT_OUT_HINT
            log.warning("ddl_left_out", tag=tag, number=number, xid=xid, end_lsn=end_lsn, reason=reason, hint=hint)
        elif command.is_later:
            log.info("ddl_awaited", tag=tag, number=number, xid=xid, end_lsn=end_lsn)
        else:
            log.info("ddl_applied", tag=tag, number=number, xid=xid, end_lsn=end_lsn)


def command_failed(stop: CommandFailed, end: Transaction, *, is_retried: bool) -> ApplyFailed:
    """Return the error the operator reads: tag, number in the queue, the server's reason, xid and end LSN."""
    command = stop.command
    goes_on = "; the daemon tries again by itself" if is_retried else "; then start the daemon again"
    return ApplyFailed(
        f"ddl: command {command.number} of the publisher's queue, {command.tag}: {stop.reason}; transaction {end.xid}, "
        f"{shown_end(end.end_lsn)}.",
        hint=stop.hint + goes_on,
    )


def parts_of(piece: Transaction, commands: JudgedFrames) -> Iterator[Transaction | JudgedCommand]:
    """Give the changes of a piece in order: each command, and what is between two of them as a piece."""
    for is_of_queue, changes in groupby(piece.changes, key=commands.__contains__):
        if is_of_queue:
            for frame in changes:
                if (command := commands[cast("bytes", frame)]) is not None:
                    yield command
            continue
        part = Transaction(piece.xid, piece.commit_lsn, piece.commit_time_us)
        part.changes = list(changes)
        part.relations = [change for change in part.changes if isinstance(change, Relation)]
        part.has_truncate = any(
            change[KIND_AT] == TRUNCATE for change in part.changes if not isinstance(change, Relation)
        )
        # A part of a transaction, even if it has no other.
        part.is_first = part.is_last = False
        yield part


class SkippedCommands:
    """Takes its commands out of a skipped transaction, and the changes that cannot be kept for lack of their table."""

    def __init__(self, job: LargeJob | StreamJob, session: WorkerSession, kit: WorkerKit, commit_lsn: int) -> None:
        """Start with nothing taken; the commit LSN is the transaction's."""
        self._job = job
        self._session = session
        self._rules = kit.rules.commands
        self._tables = kit.tables
        self._commit_lsn = commit_lsn
        self._done: list[tuple[QueuedCommand, str]] = []
        self._n_lost = 0

    async def taken_from(self, piece: Transaction, current: Mapping[int, TablePlan]) -> Transaction:
        """Return a piece without its commands, each noted as left out; `current` is in force before it."""
        if not (piece.has_ddl or self._done):
            return piece
        await self._tables.resolve_streamed(piece.relations)
        plans = self._tables.plans_from(current)
        left = Transaction(piece.xid, piece.commit_lsn, piece.commit_time_us)
        left.relations, left.is_first, left.is_last, left.size_bytes = piece.relations, False, False, piece.size_bytes
        for change in piece.changes:
            if isinstance(change, Relation):
                plans.announce(change)
                left.changes.append(change)
            elif change in self._job.commands:
                if (judged := self._job.commands[change]) is not None:
                    await note(self._session, self._rules, judged.command, self._commit_lsn, _SKIPPED)
                    self._done.append((judged.command, _SKIPPED))
            elif change[KIND_AT] != TRUNCATE and _relation_at(change, RELATION_AT)[0] in plans.current:
                left.changes.append(change)
            else:
                self._n_lost += 1
        return left

    def log(self, end: Transaction) -> None:
        """Log the commands and changes taken out, after the commit of the skip."""
        log_done(self._done, end)
        if self._n_lost:
            get_logger().warning("skip_not_whole", end_lsn=format_lsn(end.end_lsn), xid=end.xid, n_changes=self._n_lost)


def settings_of(command: QueuedCommand) -> dict[str, str]:
    """Return the settings under which a command runs here, by name."""
    given: dict[str, str] = {name: command.settings[name] for name in _TAKEN if name in command.settings}
    path = given.get("search_path", "")
    # Temporary tables of this session never take a name's place.
    return {**dict.fromkeys(_PLANNER, "on"), **given, "search_path": f"{path}, pg_temp" if path else "pg_temp"}


def reason_of(failure: StatementFailed) -> str:
    """Return the server's reason; its words only where they hold names, and no values."""
    if not failure.sqlstate:
        return str(failure)
    words = f": {failure}" if failure.sqlstate[:2] in NAMING else ""
    constraint = f", constraint {failure.constraint}" if failure.constraint else ""
    return f"{condition(failure.sqlstate)} ({failure.sqlstate}){constraint}{words}"


def _hint(command: QueuedCommand) -> str:
    return (
        "correct the target so that the command can run there; or run it there by hand, as far as it is needed, and "
        f"set ddl.skip = [{command.number}]"
    )
