"""Named points at which a test can kill, end, hold or break the daemon.

Unarmed, a point on the way of each transaction costs a look at `armed`, and any other one a call.

``PARAPPLY_FAILPOINT="name:action[:n]"`` arms one point for its n-th passing (default the first):

- ``kill``: SIGKILL to this process, as a crash does;
- ``exit``: leave at once with status 86, no clean-up;
- ``hold``: make ``NAME.held`` in ``PARAPPLY_FAILPOINT_DIR`` and wait until it is removed;
- ``raise-lost``: fail as if the connection to that side had ended.

The names are the kill points that the crash tests enumerate; a point that is never passed is a test that proves
nothing, so an unknown name is an error.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from parapply.errors import ConfigError, SourceLost, TargetLost

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECTED: Final = "connected"  # K0: both ends connected, nothing read yet
BATCH_READY: Final = "batch_ready"  # K1: a batch is complete, not yet given to a worker
BEFORE_STATE: Final = "before_state"  # K3: in the target transaction, before the state row is sent
DML_SENT: Final = "dml_sent"  # K2: changes sent, the target transaction open
BEFORE_COMMIT: Final = "before_commit"  # K4: changes and state row done, COMMIT not sent
COMMIT_SENT: Final = "commit_sent"  # K5: COMMIT sent, reply not read (in doubt)
COMMITTED: Final = "committed"  # K6: reply read, watermark not moved
ADVANCED: Final = "advanced"  # K7: watermark moved and durable, not reported to the publisher
FEEDBACK_SENT: Final = "feedback_sent"  # K8: reported to the publisher, state not pruned
PRUNING: Final = "pruning"  # K9: in the middle of pruning the state
SPOOLED: Final = "spooled"  # K10: a part of a streamed transaction is on disk, the rest not received
STREAM_ENDED: Final = "stream_ended"  # K11: its end is known, applying what was kept begins
PREPARE_SENT: Final = "prepare_sent"  # K12: PREPARE TRANSACTION sent, reply not read
PREPARED: Final = "prepared"  # reply read, the PREPARE not recorded
DECISION_SENT: Final = "decision_sent"  # K13: COMMIT or ROLLBACK PREPARED sent, reply not read
DECIDED: Final = "decided"  # reply read, the outcome not recorded
RANGE_PART: Final = "range_part"  # K17: a part of a range of WAL is taken, the rest not received
RANGE_READ: Final = "range_read"  # K18: a range is read whole, the next not asked for
SLOT_MOVED: Final = "slot_moved"  # K19: the slot was moved between two ranges
HANDED_OVER: Final = "handed_over"  # K20: the copy of the slot is dropped, the stream not started
RECOVERY: Final = "recovery"  # K15: in the start-up's own recovery
DRAIN: Final = "drain"  # K16: in an orderly shutdown

#: Points of `init --copy` and `refresh`, in their order; not passed by the daemon.
COPY_SLOT: Final = "copy_slot"  # the slot exists, nothing on the target knows of it
COPY_STATE: Final = "copy_state"  # the state names the tables, nothing is copied
COPY_BEGUN: Final = "copy_begun"  # the tables are noted as being copied
COPY_PART: Final = "copy_part"  # all rows of a part sent, not committed
COPY_PART_DONE: Final = "copy_part_done"  # a part committed, its table not noted as copied
COPY_TABLE_DONE: Final = "copy_table_done"  # a table noted as copied
COPY_DONE: Final = "copy_done"  # all tables noted

COPY_NAMES: Final = (COPY_SLOT, COPY_STATE, COPY_BEGUN, COPY_PART, COPY_PART_DONE, COPY_TABLE_DONE, COPY_DONE)
#: Points of commands of the publisher that run outside of transactions; other loads have none.
LATER_BEGUN: Final = "later_begun"  # one is noted as begun, not sent
LATER_DONE: Final = "later_done"  # it has run, and is not noted as applied

LATER_NAMES: Final = (LATER_BEGUN, LATER_DONE)
#: Points of `migrate`.
MIGRATE_BEGUN: Final = "migrate_begun"  # a step is noted as begun, nothing of it is done
MIGRATE_ITEM: Final = "migrate_item"  # a statement after the rows is committed and noted with it
MIGRATE_DONE: Final = "migrate_done"  # what a step does is done, and not noted

MIGRATE_NAMES: Final = (MIGRATE_BEGUN, MIGRATE_ITEM, MIGRATE_DONE)
#: Point of `migrate` of several databases.
MIGRATE_DATABASE: Final = "migrate_database"  # a database is made, and has not its name yet
#: Points of `parapply heal`, in their order.
HEAL_COMPARED: Final = "heal_compared"  # all tables are compared, nothing is changed
HEAL_BEGUN: Final = "heal_begun"  # the state says so, the old slot may exist
HEAL_SLOT: Final = "heal_slot"  # the new slot exists
HEAL_TABLE: Final = "heal_table"  # the rows of a table are repaired, not committed
HEAL_TABLE_DONE: Final = "heal_table_done"  # they are committed
HEAL_DONE: Final = "heal_done"  # all rows are repaired, the state does not say so

HEAL_NAMES: Final = (HEAL_COMPARED, HEAL_BEGUN, HEAL_SLOT, HEAL_TABLE, HEAL_TABLE_DONE, HEAL_DONE)
#: Points of `parapply cutover` with poolers: they are noted, nothing is paused; all are paused, there is no fence; the
#: first one's file is rewritten, not read again; all lead to the target, paused; the first one is resumed.
POOLER_NAMES: Final = (
    "cutover_pausing", "cutover_paused", "cutover_rewritten", "cutover_led_on", "cutover_resumed",
)  # fmt: skip
#: Points of `parapply cutover` with commands of the operator's: one is noted, and has not begun; it has ended with 0,
#: and is not noted as run.
HOOK_NAMES: Final = ("cutover_hook_begun", "cutover_hook_ended")
#: Points of `parapply seed`, in their order.
SEED_SCHEMA: Final = "seed_schema"  # the state schema exists, without the slot
SEED_JOINED: Final = "seed_joined"  # the slot's row is committed, nothing that came along is ended
SEED_CLEANED: Final = "seed_cleaned"  # it is ended, nothing was said

SEED_NAMES: Final = (SEED_SCHEMA, SEED_JOINED, SEED_CLEANED)
#: Points of `parapply capture`, in their order.
CAPTURE_LOOKED: Final = "capture_looked"  # the folder is locked and looked through, nothing is asked or changed
CAPTURE_BEGUN: Final = "capture_begun"  # the start is noted, the slot not made
CAPTURE_SLOT: Final = "capture_slot"  # the slot exists, its position is not noted
CAPTURE_WRITTEN: Final = "capture_written"  # a block is written, not synced
CAPTURE_SYNCED: Final = "capture_synced"  # it is synced, and not reported
CAPTURE_REPORTED: Final = "capture_reported"  # it is reported to the publisher
CAPTURE_CUT: Final = "capture_cut"  # a capture that goes on has cut the end off, nothing else

CAPTURE_NAMES: Final = (
    CAPTURE_BEGUN, CAPTURE_SLOT, CAPTURE_WRITTEN, CAPTURE_SYNCED, CAPTURE_REPORTED, CAPTURE_CUT,
    CAPTURE_LOOKED,
)  # fmt: skip
#: Points of `parapply cutover`: a step is noted on the target, nothing of it is done.
CUTOVER_NAMES: Final = (
    "cutover_preparing", "cutover_fencing", "cutover_draining", "cutover_comparing", "cutover_sequences",
    "cutover_stopping", "cutover_turning", "cutover_opening", "cutover_ending", "cutover_done",
)  # fmt: skip
NAMES: Final = frozenset(
    {
        CONNECTED,
        BATCH_READY,
        BEFORE_STATE,
        DML_SENT,
        BEFORE_COMMIT,
        COMMIT_SENT,
        COMMITTED,
        ADVANCED,
        FEEDBACK_SENT,
        PRUNING,
        SPOOLED,
        STREAM_ENDED,
        PREPARE_SENT,
        PREPARED,
        DECISION_SENT,
        DECIDED,
        RANGE_PART,
        RANGE_READ,
        SLOT_MOVED,
        HANDED_OVER,
        RECOVERY,
        DRAIN,
    }
)
ACTIONS: Final = frozenset({"kill", "exit", "hold", "raise-lost"})

#: Exit status of the action ``exit``: none of our own, so that a test knows the point was reached.
EXIT_STATUS: Final = 86

_VARIABLE: Final = "PARAPPLY_FAILPOINT"
_DIRECTORY_VARIABLE: Final = "PARAPPLY_FAILPOINT_DIR"
#: Points at which the publisher is lost; all others lose the target.
_SOURCE_SIDE: Final = frozenset(
    {CONNECTED, BATCH_READY, FEEDBACK_SENT, SPOOLED, RANGE_PART, RANGE_READ, SLOT_MOVED, HANDED_OVER, *CAPTURE_NAMES}
)
#: Seconds between checks of the held file: short compared with any step of a test.
_HOLD_POLL_S: Final = 0.005


class _Point:
    def __init__(self, name: str, action: str, hits_left: int, directory: Path | None) -> None:
        self.name = name
        self.action = action
        self.hits_left = hits_left
        self.directory = directory


_armed: _Point | None = None
#: Name of the armed point; empty: none is. Written by `arm`.
armed = ""


def arm(environ: Mapping[str, str]) -> None:
    """Arm the point the environment names, or none.

    Raises:
        ConfigError: unknown name or action, a count below 1, or ``hold`` without a directory.
    """
    global _armed, armed  # noqa: PLW0603  one point a process, read on the hot path
    text = environ.get(_VARIABLE, "")
    _armed = _parse(text, environ.get(_DIRECTORY_VARIABLE, "")) if text else None
    armed = _armed.name if _armed is not None else ""


def probe(name: str) -> None:
    """Do what is armed for this point, if anything.

    Raises:
        SourceLost: armed with ``raise-lost`` at a point on the publisher's side.
        TargetLost: armed with ``raise-lost`` at any other point.
    """
    if _armed is not None and _armed.name == name:
        _pass(_armed)


def _parse(text: str, directory: str) -> _Point:
    name, _, rest = text.partition(":")
    action, _, count = rest.partition(":")
    points = (
        NAMES, COPY_NAMES, MIGRATE_NAMES, (MIGRATE_DATABASE,), CUTOVER_NAMES, LATER_NAMES, HEAL_NAMES, SEED_NAMES,
        CAPTURE_NAMES, POOLER_NAMES, HOOK_NAMES,
    )  # fmt: skip
    known = {one for names in points for one in names}
    if name not in known:
        raise ConfigError(f"{_VARIABLE}: unknown point {name!r}; known are {', '.join(sorted(known))}")
    if action not in ACTIONS:
        raise ConfigError(f"{_VARIABLE}: unknown action {action!r}; known are {', '.join(sorted(ACTIONS))}")
    if count and (not count.isdecimal() or int(count) < 1):
        raise ConfigError(f"{_VARIABLE}: the count must be a number from 1, not {count!r}")
    if action == "hold" and not Path(directory or "/dev/null").is_dir():
        raise ConfigError(f"{_DIRECTORY_VARIABLE}: must be a directory for the action hold")
    return _Point(name, action, int(count or 1), Path(directory) if directory else None)


def _pass(point: _Point) -> None:
    point.hits_left -= 1
    if point.hits_left != 0:
        return
    if point.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if point.action == "exit":
        os._exit(EXIT_STATUS)
    if point.action == "raise-lost":
        lost = SourceLost if point.name in _SOURCE_SIDE else TargetLost
        raise lost(f"failpoint {point.name}: connection declared lost.")
    if point.directory is not None:
        _hold(point.directory / f"{point.name}.held")


def _hold(path: Path) -> None:
    # Blocks the whole process on purpose: what is tested is a leader that hangs.
    path.touch()
    while path.exists():
        time.sleep(_HOLD_POLL_S)
