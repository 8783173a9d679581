"""The queue of commands in the stream: its rows mark a transaction and reach no table, and each is a command."""

from __future__ import annotations

import json

import pytest

from parapply.errors import ProtocolError
from parapply.model import Relation
from parapply.wire.assembler import Assembler
from parapply.wire.ddl_queue import MadeTable, QueuedCommand, is_create_index, later_index, names_queue, read_command
from tests import build

_OID, _OTHER = 2**31 + 7, 16384
_NAMES = ("id", "command", "tag", "role_name", "first_schema", "settings", "made")
_SETTINGS = {"search_path": 'app, "odd"', "TimeZone": "UTC"}
_MADE = {"oid": 2**32 - 1, "schema": "app", "name": "t", "publications": ["pub"]}
_VALUES = (
    "12",
    "ALTER TABLE \u00e4 ADD x int",
    "ALTER TABLE",
    "app",
    "app",
    json.dumps(_SETTINGS),
    json.dumps([_MADE]),
)
_COLUMNS = [build.ColumnSpec(name, type_oid=25) for name in _NAMES]
_ANNOUNCED = build.relation(*_COLUMNS, oid=_OID, namespace="parapply", name="ddl_queue")
_ROW = build.row(*[build.text(value.encode()) for value in _VALUES])
_PLAIN = build.row(build.text(b"1"))


def _frames(*payloads: bytes) -> list[bytes]:
    return [build.xlog_data(payload) for payload in payloads]


def _queue(assembler: Assembler) -> Relation:
    queue = assembler.queue
    assert isinstance(queue, Relation)
    return queue


def test_a_row_of_the_queue_marks_its_transaction() -> None:
    """Before its announcement and in other tables nothing is marked; the queue itself is announced to no other part."""
    assembler = Assembler(1 << 30)
    before, marked, after = assembler.push(
        _frames(
            build.begin(), build.insert(_ROW, oid=_OID), build.commit(),
            build.begin(), _ANNOUNCED, build.insert(_PLAIN), build.insert(_ROW, oid=_OID), build.commit(),
            build.begin(), build.insert(_PLAIN), build.commit(),
        )
    )  # fmt: skip
    assert [one.has_ddl for one in (before, marked, after)] == [False, True, False]
    assert list(marked.relations) == []
    frames = [change for change in marked.changes if isinstance(change, bytes)]
    assert [names_queue(frame, _queue(assembler)) for frame in frames] == [False, True]
    assert read_command(frames[1], _queue(assembler)) == QueuedCommand(
        number=12,
        tag="ALTER TABLE",
        command=_VALUES[1],
        role_name="app",
        schema="app",
        settings=_SETTINGS,
        made=(MadeTable(oid=2**32 - 1, schema="app", name="t", publications=("pub",)),),
    )


def test_in_a_stream_the_same() -> None:
    """A chunk is marked, and its frame read, as if it had come whole."""
    assembler = Assembler(1 << 30)
    (chunk,) = assembler.push(
        _frames(
            build.stream_start(),
            build.relation(*_COLUMNS, oid=_OID, namespace="parapply", name="ddl_queue", xid=700),
            build.insert(_ROW, oid=_OID, xid=700),
            build.stream_stop(),
        )
    )  # fmt: skip
    assert chunk.has_ddl
    (frame,) = chunk.changes
    assert isinstance(frame, bytes)
    command = read_command(frame, _queue(assembler))
    assert command is not None
    assert command.number == 12


def test_what_is_no_command() -> None:
    """Rows of the queue may be changed and removed: none of that runs anything, and TRUNCATE is of the other tables."""
    assembler = Assembler(1 << 30)
    (transaction,) = assembler.push(
        _frames(
            build.begin(), _ANNOUNCED, build.delete(key=_ROW, oid=_OID), build.truncate(_OID),
            build.truncate(_OTHER, _OID, flags=2), build.commit(),
        )
    )  # fmt: skip
    deleted, truncated = transaction.changes
    assert isinstance(deleted, bytes)
    assert read_command(deleted, _queue(assembler)) is None
    assert [truncated] == _frames(build.truncate(_OTHER, flags=2))


def test_another_table_under_its_number() -> None:
    """A table that has the OID now, or the queue under another name, is a table like all others."""
    assembler = Assembler(1 << 30)
    (transaction,) = assembler.push(
        _frames(
            build.begin(), _ANNOUNCED, build.relation(oid=_OID, name="kept"), build.insert(_PLAIN, oid=_OID),
            build.commit(),
        )
    )  # fmt: skip
    assert not transaction.has_ddl
    assert [relation.name for relation in transaction.relations] == ["kept"]


@pytest.mark.parametrize("column", range(len(_NAMES)))
def test_a_row_that_is_not_the_triggers(column: int) -> None:
    """A row that the queue's trigger cannot have written is refused, whatever is wrong with it."""
    assembler = Assembler(1 << 30)
    cells = [build.text(value.encode()) for value in _VALUES]
    cells[column] = build.text(b"\xff")
    (transaction,) = assembler.push(
        _frames(build.begin(), _ANNOUNCED, build.insert(build.row(*cells), oid=_OID), build.commit())
    )
    (frame,) = transaction.changes
    assert isinstance(frame, bytes)
    with pytest.raises(ProtocolError, match=r"a row of parapply\.ddl_queue cannot be read"):
        read_command(frame, _queue(assembler))


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("CREATE INDEX CONCURRENTLY i ON t (v)", ("i", "t")),
        (
            'create unique index concurrently if not exists "I ""x" on only s . "T"(v) where v > 1',
            ('"I ""x"', 's . "T"'),
        ),
        ("CREATE INDEX CONCURRENTLY été ON only (v)", ("été", "only")),
        ("DROP INDEX CONCURRENTLY IF EXISTS s.i;", ("s.i", "")),
        ("DROP INDEX i", ("", "")),
    ],
)
def test_the_index_of_a_command_that_runs_later(command: str, names: tuple[str, str]) -> None:
    """It is named as the command has it, so that the server reads it."""
    assert later_index(command) == names
    assert is_create_index(command) == bool(names[1])
