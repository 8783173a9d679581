"""The whole error tree. Each class knows its exit code, whether to retry, and what the operator can do.

| class            | exit | retry     | who acts                                             |
|------------------|------|-----------|------------------------------------------------------|
| ConfigError      | 2    | never     | the operator corrects the named fields               |
| ProtocolError    | 3    | never     | a bug or a server newer than this program: report it |
| SourceRefused    | 3    | never     | wrong cluster, a privilege is missing: see the hint  |
| NoPublication    | 3    | never     | one was missing for a time: see the hint             |
| SlotLost         | 3    | never     | slot lost, or a gap: the operator heals it           |
| SlotGone         | 3    | never     | the same, or the daemon heals it if it may           |
| SourceLost       | 3    | reconnect | none: the daemon reconnects with back-off            |
| SlotBusy         | 3    | reconnect | another reader holds the slot                        |
| StreamLeft       | 3    | reconnect | none: both ends are opened again at once             |
| WalLimitReached  | 3    | reconnect | none: the slot is dropped, if it still keeps as much |
| SpillFailed      | 3    | reconnect | the operator makes room in the spill directory       |
| TargetRefused    | 4    | never     | a privilege, a table or a column is missing          |
| StateClosed      | 4    | never     | missing, cut over or of another version: see hint    |
| StateGone        | 4    | never     | the operator brings it back: the daemon waits for it |
| LeaseHeld        | 4    | never     | another daemon holds the lease: stop it or take over |
| TargetLost       | 4    | reconnect | none: state is read again, the stream replayed       |
| LocksExhausted   | 4    | reconnect | none: later batches have fewer tables                |
| ApplyFailed      | 5    | never     | a conflict or data error remains after the retry     |
| CaptureRefused   | 2    | never     | a captured file is not as it was written: see hint   |
| CaptureTorn      | 2    | never     | the same at the end of the last one: cut it          |
| CaptureFull      | 1    | never     | the operator gives the capture more room             |
| ReportRefused    | 2    | never     | no log there, another report is at work: see hint    |
| JavaMissing      | 2    | never     | the operator installs Java                           |
| ReportFailed     | 1    | never     | Spark stopped: see what it said; run it again        |

A function that asks a server raises SourceLost or TargetLost if the connection breaks, and SourceRefused or
TargetRefused if the server does not do it, such as for want of a privilege. Docstrings name these errors only where
they have another cause.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from parapply.printable import printable

#: Characters that end a sentence.
_STOPS = (".", "!", "?")


class Retry(Enum):
    """The daemon's reaction to an error."""

    NEVER = "never"
    RECONNECT = "reconnect"


class ParapplyError(Exception):
    """parapply failed."""

    exit_code: ClassVar[int] = 1
    retry: ClassVar[Retry] = Retry.NEVER

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        """Keep the message and the hint; the class docstring is the default message.

        Args:
            message: what happened and why, without row values and secrets.
            hint: what the operator can do.
        """
        super().__init__(message or (type(self).__doc__ or "").splitlines()[0])
        self.hint = hint

    def line(self) -> str:
        """Return the one line an operator reads: what happened, why, and what to do."""
        text = printable(" ".join(str(self).split()))
        if not self.hint:
            return text
        return f"{text}{'' if text.endswith(_STOPS) else '.'} Hint: {printable(' '.join(self.hint.split()))}"


class ConfigError(ParapplyError):
    """The configuration is wrong."""

    exit_code = 2


class ProtocolError(ParapplyError):
    """The publisher sent bytes that are not pgoutput as documented."""

    exit_code = 3

    def __init__(self, kind: str, offset: int, reason: str) -> None:
        """Name the message kind (its type byte, or '' when unknown), the offset in bytes and the reason."""
        super().__init__(
            f"pgoutput message {kind!r}, offset {offset}: {reason}.",
            hint="this is a bug in parapply or a publisher newer than it knows; nothing was lost, please report it",
        )
        self.kind = kind
        self.offset = offset
        self.reason = reason


class SourceRefused(ParapplyError):
    """The publisher cannot serve this slot."""

    exit_code = 3


class NoPublication(SourceRefused):
    """The slot cannot give changes of a time when a publication was missing."""


class SlotLost(SourceRefused):
    """The slot cannot give changes that the target lacks."""


class SlotGone(SlotLost):
    """The slot was dropped or invalidated, and nothing says that the publisher lacks what the target has."""


class SourceLost(ParapplyError):
    """The connection to the publisher ended."""

    exit_code = 3
    retry = Retry.RECONNECT


class SlotBusy(SourceLost):
    """Another process reads the slot."""


class StreamLeft(SourceLost):
    """The stream is left: ranges of WAL bring it forward sooner, or only a new one has the tables' present names.

    The daemon's own decision: no connection was lost, and there is nothing to wait for.
    """


class WalLimitReached(SourceLost):
    """The slot keeps more WAL than source.retained_wal_limit_bytes, and is to be dropped for it.

    The stream is left, because a slot that is read cannot be dropped.
    """


class SpillFailed(SourceLost):
    """A transaction in progress on the publisher could not be kept on disk until its commit.

    The stream is left for it: the publisher sends that transaction again, whole if its end is known.
    """

    def __init__(self, message: str, *, hint: str = "", end_lsn: int = 0) -> None:
        """Keep the message, and where the transaction ends; 0 if that is not known."""
        super().__init__(message, hint=hint)
        self.end_lsn = end_lsn


class TargetRefused(ParapplyError):
    """The target cannot take the changes."""

    exit_code = 4


class StateClosed(TargetRefused):
    """No daemon goes on with this state, whatever its configuration: missing, cut over or of another version."""


class StateGone(StateClosed):
    """The target has lost the state that this very process has served from."""


class LeaseHeld(ParapplyError):
    """Another parapply daemon holds the lease of this slot."""

    exit_code = 4


class TargetLost(ParapplyError):
    """The connection to the target ended."""

    exit_code = 4
    retry = Retry.RECONNECT


class LocksExhausted(TargetLost):
    """The target has no place left for the locks of a batch's tables and indexes.

    The stream is read again from the last commit, and batches have fewer tables from then on.
    """


class StatementFailed(ParapplyError):
    """A statement failed on the target; the batch is retried at the head before anything is concluded.

    Never reaches the operator as such: the worker turns what still fails at the head into ApplyFailed.
    """

    exit_code = 5

    def __init__(  # noqa: PLR0913  the fields of the server's answer
        self, message: str, *, sqlstate: str = "", schema: str = "", table: str = "", constraint: str = "",
        statement: int = -1, is_for_locks: bool = False, ends_session: bool = False,
    ) -> None:  # fmt: skip
        """Keep what the server said.

        Args:
            message: the primary message of the server; it can hold values, so it is never logged.
            sqlstate: five characters, or empty for a wrong row count.
            schema: of the table.
            table: that the error is about: of a partitioned table the partition; empty if the server names none.
            constraint: name of the violated constraint, if any; names identify constraints only within one schema.
            statement: index of the failed statement among those sent.
            is_for_locks: the server's table of locks is full.
            ends_session: it is of the session or the machine, and not of the data.
        """
        super().__init__(message)
        self.sqlstate = sqlstate
        self.schema = schema
        self.table = table
        self.constraint = constraint
        self.statement = statement
        self.is_for_locks = is_for_locks
        self.ends_session = ends_session


class ApplyFailed(ParapplyError):
    """A conflict or a data error remains after the retry at the head."""

    exit_code = 5


class CaptureRefused(ParapplyError):
    """A captured stream cannot be used."""

    exit_code = 2


class CaptureTorn(CaptureRefused):
    """A file of a capture is not whole from some place on."""

    def __init__(self, file: str, offset: int, why: str) -> None:
        """Keep the file's name and the offset from which on nothing of it can be used."""
        super().__init__(
            f"{file} is not whole from byte {offset} on: {why}.",
            hint="the capture of a kept slot goes on with the same command, which cuts that off; to apply what is"
            " before it, `parapply replay --despite-torn`",
        )
        self.file = file
        self.offset = offset


class CaptureFull(ParapplyError):
    """A capture has no room left."""


class ReportRefused(ParapplyError):
    """The report cannot be made."""

    exit_code = 2


class JavaMissing(ReportRefused):
    """Spark needs Java, which is not installed."""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        """Keep the message; the hint says what to install unless the caller knows better."""
        super().__init__(
            message,
            hint=hint or "install default-jre-headless (Debian), or parapply[java] with pip, which has a runtime",
        )


class ReportFailed(ParapplyError):
    """Spark could not finish the report."""
