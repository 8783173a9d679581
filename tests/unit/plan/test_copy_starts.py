"""From which LSN on a table's changes are applied: before it, at it, while it is copied, and without any copy."""

from __future__ import annotations

import msgspec
import pytest

from parapply.model import Column, Relation, Transaction
from parapply.plan.copy_starts import CopyStarts, Start
from parapply.plan.steps import read_truncate
from parapply.target.state.copies import Copies, CopyRow
from parapply.vocabulary import SCHEMA_ONLY, CopyState
from tests import build

_ONE, _TWO = ("s", "one"), ("s", "two")
_OID = {_ONE: 1, _TWO: 2}


def _relation(name: tuple[str, str]) -> Relation:
    column = Column(name="id", type_oid=23, type_modifier=-1, is_key=True)
    return Relation(oid=_OID[name], schema=name[0], name=name[1], replica_identity="d", columns=(column,))


def _insert(name: tuple[str, str]) -> bytes:
    return build.xlog_data(build.insert(build.row(build.text(b"1")), oid=_OID[name]))


def _transaction(commit_lsn: int, *changes: bytes) -> Transaction:
    made = Transaction(700, commit_lsn, 1)
    made.end_lsn = commit_lsn + 8
    made.changes = list(changes)
    made.size_bytes = sum(len(change) + 400 for change in changes)
    return made


@pytest.fixture
def starts() -> CopyStarts:
    """One table copied as of 100, the other one known by name only; both are announced."""
    made = CopyStarts()
    made.update({_ONE: Start(100, is_copied=True)}, {}, is_listed=False)
    for name in (_ONE, _TWO):
        made.announce(_relation(name))
    return made


def test_changes_before_the_start_are_left_out(starts: CopyStarts) -> None:
    """Transactions committed before the snapshot are in the copy; their changes of other tables stay."""
    found = starts.without_skipped(_transaction(99, _insert(_ONE), _insert(_TWO)))
    assert found.changes == [_insert(_TWO)]
    assert (found.commit_lsn, found.end_lsn, found.xid) == (99, 107, 700)
    assert starts.apart


def test_a_commit_at_the_start_counts(starts: CopyStarts) -> None:
    """The snapshot shows what commits before its LSN: a commit record at it is the first that counts."""
    whole = _transaction(100, _insert(_ONE), _insert(_TWO))
    assert starts.without_skipped(whole) is whole
    assert not starts.apart, "nothing is looked at any more"


def test_a_table_that_nobody_copies_gets_nothing() -> None:
    """With `is_listed` a table that is not copied waits for a refresh, however late its changes come."""
    starts = CopyStarts()
    starts.update({_ONE: Start(0, is_copied=True)}, {}, is_listed=True)
    for name in (_ONE, _TWO):
        starts.announce(_relation(name))
    assert starts.without_skipped(_transaction(10**9, _insert(_TWO), _insert(_ONE))).changes == [_insert(_ONE)]
    assert starts.waits_for(_transaction(10**9, _insert(_TWO))) is None
    assert starts.exact_from_lsn == 0


def test_what_is_later_than_a_copy_under_way_waits(starts: CopyStarts) -> None:
    """Only a transaction with a change of that table waits, and only behind the copy's LSN."""
    starts.update({_ONE: Start(200, is_copied=False)}, {}, is_listed=False)
    assert starts.exact_from_lsn is None
    assert starts.waits_for(_transaction(199, _insert(_ONE))) is None
    assert starts.waits_for(_transaction(200, _insert(_TWO))) is None
    assert starts.waits_for(_transaction(200, _insert(_TWO), _insert(_ONE))) == _ONE
    assert starts.copying_of([_relation(_ONE)], 200) == _ONE
    starts.update({_ONE: Start(300, is_copied=True)}, {}, is_listed=False)
    assert starts.waits_for(_transaction(200, _insert(_ONE))) is None
    assert starts.without_skipped(_transaction(200, _insert(_ONE))).changes == []


def test_a_truncate_keeps_the_other_tables(starts: CopyStarts) -> None:
    """A TRUNCATE of several tables is made one of those that are applied; its flags stay."""
    whole = _transaction(50, build.xlog_data(build.truncate(1, 2, flags=2)))
    (kept,) = starts.without_skipped(whole).changes
    assert isinstance(kept, bytes)
    message = read_truncate(kept)
    assert (message.relation_oids, message.restart_identity, message.cascade) == ((2,), True, False)
    assert starts.without_skipped(_transaction(50, build.xlog_data(build.truncate(1)))).changes == []


def test_what_is_read_later_keeps_its_own_place(starts: CopyStarts) -> None:
    """Pieces of a streamed transaction are read after the stream has gone on: its own commit says what counts."""
    kept = starts.kept_at(99)
    starts.without_skipped(_transaction(500, _insert(_TWO)))
    assert not starts.apart
    assert kept(_transaction(0, _insert(_ONE), _insert(_TWO))).changes == [_insert(_TWO)]


def test_a_table_is_known_by_its_oid(starts: CopyStarts) -> None:
    """Under another name it goes on; another table of its name is not it. An older state has names only."""
    starts.update({1: Start(None, is_copied=False), _TWO: Start(0, is_copied=True)}, {}, is_listed=True)
    renamed = Relation(oid=1, schema="s", name="other", replica_identity="d", columns=_relation(_ONE).columns)
    namesake = Relation(oid=3, schema="s", name="one", replica_identity="d", columns=renamed.columns)
    assert starts.n_waiting == 1
    assert starts.is_apart([renamed], 10**9)
    starts.update({1: Start(0, is_copied=True), _TWO: Start(0, is_copied=True)}, {}, is_listed=True)
    assert not starts.is_apart([renamed, _relation(_TWO)], 10**9)
    assert starts.is_apart([namesake], 10**9)
    assert starts.n_waiting == 0


def test_a_late_table_does_not_hold_up_two_phase_commit() -> None:
    """It gets nothing, prepared or not. A table of the first copy that waits does hold it up, until it has a start.

    So does a table being copied, however early it starts: a late transaction need not announce it, and waits for no
    copy.
    """
    rows = {"schema_name": "s", "state": "waiting", "start_lsn": None}
    late = CopyRow(table_name="late", source_oid=8, reason="it is no longer on the publisher", **rows)  # type: ignore[arg-type]
    first = CopyRow(table_name="first", source_oid=9, **rows)  # type: ignore[arg-type]
    assert Copies(is_listed=True, is_running=False, tables=(late,)).is_settled(1)
    assert not Copies(is_listed=True, is_running=False, tables=(late, first)).is_settled(1)
    copying = msgspec.structs.replace(first, state=CopyState.COPYING, start_lsn=1)
    assert not Copies(is_listed=True, is_running=True, tables=(late, copying)).is_settled(1)


def test_a_table_that_the_configuration_leaves_out_gets_nothing_and_waits_for_nothing(starts: CopyStarts) -> None:
    """With rows noted or not, its changes go; it is no table that waits, and the target can equal the publisher."""
    row = CopyRow(
        schema_name="s", table_name="one", source_oid=1, state=CopyState.WAITING, start_lsn=7, reason=SCHEMA_ONLY
    )
    known = Copies(is_listed=False, is_running=False, tables=(row,))
    starts.update(known.starts(10), {}, is_listed=False)
    found = starts.without_skipped(_transaction(1 << 62, _insert(_ONE), _insert(_TWO)))
    assert found.changes == [_insert(_TWO)]
    assert starts.waits_for(_transaction(1 << 62, _insert(_ONE))) is None
    assert (starts.n_waiting, starts.exact_from_lsn, known.is_settled(1)) == (0, 0, True)
    assert not any([row.is_late, row.is_again, row.is_paused])
