"""How a session gets into either end: the DSN, and the command that prints the password where none is kept.

The first line of the command's output is the password. Nothing of the output is logged, put into an error or passed as
an argument. The command's standard error is for people, and an error repeats its last line.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import msgspec
import psycopg

from parapply import child

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds that a command may take. The first session of the control pool must be open after 15 s, with it.
COMMAND_TIMEOUT_S: Final = 10.0
#: Seconds for which a password is used again: the sessions at the begin of an epoch follow each other that fast, and
#: one run serves them all. A token that ends in this time costs one attempt, because the command is run again then.
REUSED_S: Final = 1.0
#: Bytes of a password at most; PostgreSQL takes no longer message from a client that is not let in yet.
_LONGEST_BYTES: Final = 65_534
#: Bytes of the standard error that are kept, and characters of its last line that are shown.
_COMPLAINT_BYTES: Final = 4096
_COMPLAINT_CHARACTERS: Final = 300
_PART_BYTES: Final = 65_536


class PasswordUnknown(psycopg.OperationalError):
    """The command has printed no password: as where a server is not reached, a later attempt may help."""


class PasswordCommand:
    """A command that prints a password, and its last outcome; equal to another one of the same words.

    Its outcome is used in one event loop.
    """

    __slots__ = ("_ended_s", "_lock", "_password", "_problem", "_words")

    def __init__(self, words: Sequence[str]) -> None:
        """Run nothing yet; no shell reads the words."""
        self._words = tuple(words)
        self._lock = asyncio.Lock()
        self._ended_s = float("-inf")
        self._password = ""
        #: Why the last run gave no password; empty if it did.
        self._problem = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PasswordCommand) and self._words == other._words

    def __hash__(self) -> int:
        return hash(self._words)

    def __str__(self) -> str:
        return shlex.join(self._words)

    def __repr__(self) -> str:
        return f"PasswordCommand({self._words[0]!r}, ...)"

    async def password(self, *, refused: str = "", is_new: bool = False) -> str:
        """Return the password of a run that ended after this call, or, unless `is_new`, `REUSED_S` before it at most.

        Sessions that are opened at the same time share one run. One that the server has not taken is returned only if
        another run has printed it. Raise PasswordUnknown if the command failed, or has printed none.
        """
        asked_s = time.monotonic()
        async with self._lock:
            is_shared = self._ended_s >= asked_s
            is_recent = not is_new and not self._problem and asked_s - self._ended_s < REUSED_S
            if not (is_shared or is_recent) or (refused and self._password == refused):
                await self._run()
            if self._problem:
                raise PasswordUnknown(self._problem)
            return self._password

    async def _run(self) -> None:
        self._password = self._problem = ""
        try:
            self._password = await _printed(self._words)
        except PasswordUnknown as error:
            self._problem = str(error)
        self._ended_s = time.monotonic()


class Login(msgspec.Struct, frozen=True):
    """The way into one end."""

    dsn: str  # as configured; it may hold a password
    command: PasswordCommand | None = None

    def __repr__(self) -> str:
        """Show none of it."""
        return "Login(***)"


async def _printed(words: Sequence[str]) -> str:
    """Run a command and return its first line; raise PasswordUnknown if it fails or that can be no password."""
    with ExitStack() as stack:
        (printing, its_output), (complaining, its_errors) = await child.pipe(stack), await child.pipe(stack)
        try:
            # Not by asyncio, whose start of a process that is given up may never return.
            process = subprocess.Popen(  # noqa: ASYNC220, S603  it returns at once; the operator's command
                words, stdin=subprocess.DEVNULL, stdout=its_output, stderr=its_errors, start_new_session=True
            )
        except OSError as error:
            raise PasswordUnknown(f"password_command cannot be run: {words[0]}: {error.strerror}") from error
        its_output.close()
        its_errors.close()
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                output, complaint = await asyncio.gather(
                    _read(printing, slice(_LONGEST_BYTES + 2)), _read(complaining, slice(-_COMPLAINT_BYTES, None))
                )
                code = await asyncio.to_thread(process.wait)
        except TimeoutError as error:
            child.end(process)
            raise PasswordUnknown(f"password_command has not ended after {COMMAND_TIMEOUT_S:g} s") from error
        except BaseException:
            child.end(process)
            raise
    if code:
        ended = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise PasswordUnknown(f"password_command ended with {ended}{_last_line(complaint, output)}")
    return _first_line(output)


async def _read(stream: asyncio.StreamReader, kept: slice) -> bytes:
    """Return the begin or the end of a stream, which may be of any size."""
    text = b""
    while part := await stream.read(_PART_BYTES):
        text = (text + part)[kept]
    return text


def _first_line(output: bytes) -> str:
    line = output.partition(b"\n")[0].removesuffix(b"\r")
    if not line:
        raise PasswordUnknown("password_command has printed no password in its first line")
    if len(line) > _LONGEST_BYTES:
        raise PasswordUnknown(f"password_command has printed a first line of more than {_LONGEST_BYTES:,} bytes")
    try:
        text = line.decode()
    except UnicodeDecodeError:
        # Without its cause, which holds the bytes.
        raise PasswordUnknown("password_command has printed a first line that is not UTF-8") from None
    if "\0" in text:
        raise PasswordUnknown("password_command has printed a first line with a NUL")
    return text


def _last_line(complaint: bytes, output: bytes) -> str:
    """Return the end of a message about a failed command: the last line of its standard error, without its output."""
    lines = complaint.decode(errors="replace").strip().splitlines()
    text = lines[-1].strip() if lines else ""
    for secret in output.decode(errors="replace").splitlines():
        if secret.strip():
            text = text.replace(secret.strip(), "***")
    return f": {text[:_COMPLAINT_CHARACTERS]}" if text else ""
