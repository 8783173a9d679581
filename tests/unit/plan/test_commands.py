"""The verdict on a command of the publisher, and the changes of the queue that have one."""

from __future__ import annotations

import json

import pytest

from parapply.model import Relation
from parapply.plan.commands import CommandPolicy, CommandVerdict
from parapply.wire.assembler import Assembler
from parapply.wire.ddl_queue import QueuedCommand
from tests import build

_OID = 2**31 + 7
_TAG = "ALTER TABLE"
_NAMES = ("id", "command", "tag", "role_name", "first_schema", "settings", "made")


def _command(*, is_later: bool = False) -> QueuedCommand:
    return QueuedCommand(
        number=12, tag=_TAG, command="ALTER TABLE t ADD x int", role_name="app", schema="", made=(), settings={},
        is_later=is_later,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "is_later", "verdict", "reason"),
    [
        (CommandPolicy(True, (), (_TAG,)), False, CommandVerdict.RUN, ""),
        (CommandPolicy(True, (11,), (_TAG,)), True, CommandVerdict.LATER, ""),
        (CommandPolicy(True, (12,), ()), True, CommandVerdict.SKIP, "ddl.skip names it"),
        (CommandPolicy(True, (), ("DROP TABLE",)), True, CommandVerdict.REFUSE, "ddl.tags does not allow ALTER TABLE"),
        (CommandPolicy(False, (12,), (_TAG,)), False, CommandVerdict.SKIP, "ddl.apply is off"),
    ],
)
def test_verdicts(policy: CommandPolicy, verdict: CommandVerdict, reason: str, *, is_later: bool) -> None:
    """Commands that are off or named by number are left out, before the tag counts; the way of running comes last."""
    assert policy.judged(_command(is_later=is_later))[1:] == (verdict, reason)


def test_every_change_of_the_queue_is_found() -> None:
    """An INSERT brings a command, another change of the queue brings none, and other tables have no part in it."""
    values = ("12", "DROP TABLE t", "DROP TABLE", "app", "app", json.dumps({}), json.dumps([]))
    row = build.row(*[build.text(value.encode()) for value in values])
    payloads = (
        build.begin(),
        build.relation(*[build.ColumnSpec(name, type_oid=25) for name in _NAMES], oid=_OID, namespace="parapply",
                       name="ddl_queue"),
        build.insert(build.row(build.text(b"1"))),
        build.insert(row, oid=_OID),
        build.delete(key=row, oid=_OID),
        build.commit(),
    )  # fmt: skip
    assembler = Assembler(1 << 30)
    (transaction,) = assembler.push([build.xlog_data(payload) for payload in payloads])
    queue = assembler.queue
    assert isinstance(queue, Relation)
    policy = CommandPolicy(True, (), (_TAG,))
    found = policy.judged_frames(transaction.changes, queue)
    frames = [change for change in transaction.changes if isinstance(change, bytes)]
    assert list(found) == frames[1:]
    judged, nothing = found.values()
    assert nothing is None
    assert judged is not None
    assert (judged.command.number, judged.verdict) == (12, CommandVerdict.REFUSE)
    assert policy.judged_frames(transaction.changes, None) == {}
