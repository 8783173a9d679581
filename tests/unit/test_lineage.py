"""What single transactions depend on: the same as batches of one transaction each meet, nearest first, and bounded."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parapply.applylog_schema import DEPENDS_ON_LIMIT
from parapply.lineage import graph as lineages
from parapply.lineage.graph import TransactionGraph
from parapply.lineage.holders import Holders
from parapply.lineage.tracks import Track
from parapply.model import Relation, Transaction
from parapply.plan.overlap import overlaps
from parapply.target.catalogue.match import match
from parapply.vocabulary import BarrierReason
from parapply.wire.rows import INSERT, KIND_AT, TRUNCATE
from tests import build
from tests.unit.changes_model import KEYLESS, NUMERIC, PAIR, PLAIN, SPECS, UNIQUE
from tests.unit.changes_stream import Op, Publisher, assembled, batches, one_of_all, ops
from tests.unit.foreign_key_model import CHILD, PARENT, Source
from tests.unit.foreign_key_model import Op as FamilyOp
from tests.unit.plans import column, foreign_key, relation, sent, table, unique

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.lineage.graph import Traced
    from parapply.lineage.holders import Found
    from parapply.plan.batch import Batch
    from parapply.plan.plans import Plans

_KINDS = ("put", "put", "update", "delete", "move", "commit", "truncate")
_FAMILY_KINDS = ("insert",) * 3 + ("delete", "update", "move") + ("commit",) * 3
_FAMILY_OP = one_of_all(_FAMILY_KINDS, [PARENT, CHILD], range(1, 6), [None, 1, 2, 3, 4, 5]).map(
    lambda parts: FamilyOp(*parts)
)


def _trace(transactions: Sequence[Transaction], plans: Plans) -> list[Traced]:
    """Return what is said of each."""
    lineage = TransactionGraph(table_lock_threshold=1000)
    lineage.use(plans.current)
    return [lineage.add(transaction, plans) for transaction in transactions]


def _singles(transactions: Sequence[Transaction], plans: Plans) -> list[list[Batch]]:
    """Return a batch for each change of each transaction: what a batch of all of them merges away is there."""
    parts = []
    for whole in transactions:
        parts.append([Transaction(whole.xid, whole.commit_lsn, whole.commit_time_us)])
        for change in whole.changes:
            part = parts[-1][-1]
            part.changes.append(change)
            if isinstance(change, Relation):
                part.relations = [*part.relations, change]
            else:
                part.has_truncate = change[KIND_AT] == TRUNCATE
                parts[-1].append(Transaction(whole.xid, whole.commit_lsn, whole.commit_time_us))
    singles = iter(batches([part for all_parts in parts for part in all_parts], plans, []))
    return [[next(singles) for _ in all_parts] for all_parts in parts]


def _check(
    traced: Sequence[Traced],
    done: Sequence[Batch],
    singles: Sequence[Sequence[Batch]] = (),
    again: Callable[[], list[list[Batch]]] | None = None,
) -> None:
    """Check that one is reached from all that it meets, and depends on nothing that none of its changes meets.

    Args:
        traced: what is said of each.
        done: a batch for each.
        singles: a batch for each change of each; none if more may be said.
        again: makes them anew, where every old row was sent.
    """
    reached: list[set[int]] = []
    for one, later in zip(traced, done, strict=True):
        direct = {before.seq for before in one.depends_on}
        reached.append(direct.union(*[reached[seq - 1] for seq in direct]))
        for before in one.depends_on:
            if before.kind == "barrier":
                reached[-1].update(range(1, before.seq + 1))
        assert list(one.depends_on) == sorted(one.depends_on, key=lambda before: -before.seq)
        met = {earlier.seq for earlier in done[: later.seq - 1] if overlaps(earlier, later)}
        # A suspect batch runs alone for how it is applied, not for what it depends on.
        alone = set(met) if later.is_suspect else {batch.seq for batch in done if batch.is_suspect}
        missing = met - alone - reached[-1]
        assert not missing or again, f"transaction {one.seq} depends on {one.depends_on}"
        for seq in missing:
            # A batch that was compared with earlier ones knows of values that those have freed, and passes for their
            # holder. Where old rows are sent, batches that were compared with nobody tell who it is.
            parts = again() if again else []
            pairs = itertools.product(parts[seq - 1], parts[one.seq - 1])
            assert not any(overlaps(earlier, this) for earlier, this in pairs), f"{one.seq} depends on {seq}"
        for seq in direct - met if singles else ():
            # What a transaction makes and takes away again is gone from its batch; the record still names it.
            pairs = itertools.product(singles[seq - 1], singles[one.seq - 1])
            assert any(overlaps(earlier, this) for earlier, this in pairs), f"{one.seq} depends on {seq}"


def _inserted(*values: bytes) -> bytes:
    return build.xlog_data(build.insert(build.row(*map(build.text, values))))


def test_indexes_and_foreign_keys_of_one_name_on_two_leaves_stay_two() -> None:
    """Equal values of one leaf's index and of another's are no dependency; a foreign key of each is known."""
    columns = [sent("id", is_key=True), sent("v")]
    plans = []
    for oid in (8, 9):
        keys = foreign_key("parent", "v", parent_oid=oid + 100, is_enforced=True)
        facts = table([column("id"), column("v")], ("id",), oid=oid, root_oid=1, unique=(unique("u", "v"),),
                      foreign_keys=(keys,))  # fmt: skip
        plans.append(match(relation(*columns, oid=oid), facts))
    past = Holders()
    first, second = [Track(plan, past) for plan in plans]
    found: Found = {}
    first.begin(1, {})
    first.look(_inserted(b"1", b"7"), INSERT, found)
    second.begin(2, {})
    second.look(_inserted(b"2", b"7"), INSERT, found)
    assert not found
    assert [len(past.referring(oid)) for oid in (108, 109)] == [1, 1]


@given(wishes=ops(SPECS, _KINDS))
def test_transactions_depend_on_what_they_meet(wishes: list[Op]) -> None:
    """Of keys, moved rows, tables taken whole, serial tables and TRUNCATE; rows are counted by table and operation."""
    publisher = Publisher()
    transactions = assembled(publisher.run(wishes))
    view = publisher.plans.view()
    traced = _trace(transactions, view)
    singles = _singles(transactions, publisher.plans.view())
    done = batches(transactions, publisher.plans, [])
    _check(traced, done, singles)
    assert view.current == publisher.plans.current
    for one, batch in zip(traced, done, strict=True):
        assert (one.xid, one.end_lsn, one.n_changes) == (batch.transactions[0].xid, batch.end_lsn, batch.n_changes)
        rows = sum(counts.insert + counts.update + counts.delete for counts in one.rows.values())
        assert rows == sum(
            frame[KIND_AT] != TRUNCATE for frame in batch.transactions[0].changes if isinstance(frame, bytes)
        )


@pytest.mark.parametrize("is_full", [False, True], ids=["key", "full"])
@given(wishes=st.lists(_FAMILY_OP, max_size=80), is_enforced=st.booleans())
@settings(max_examples=150, deadline=None)
def test_unique_values_and_parents(*, wishes: list[FamilyOp], is_enforced: bool, is_full: bool) -> None:
    """Of unique values claimed or freed, and of parents that come, go or are referred to.

    Where old rows are not sent, a value is known to be freed from what was said of the row before, however long ago:
    batches know only those in flight, so there transactions may depend on more.
    """
    source = Source(is_full=is_full, is_enforced=is_enforced)
    source.run(wishes)
    traced = _trace(source.transactions, source.plans.view())
    done = batches(source.transactions, source.plans, [])

    def singles() -> list[list[Batch]]:
        return _singles(source.transactions, source.plans.view())

    if is_full:
        _check(traced, done, singles(), singles)
    else:
        _check(traced, done)


@given(wishes=ops((PLAIN, PAIR, NUMERIC, KEYLESS, UNIQUE), ("put", "update", "delete", "move", "commit", "announce")))
def test_an_announcement_inside_changes_how_rows_are_read(wishes: list[Op]) -> None:
    """Columns may be announced anew at any place; nothing fails, and keys stay the same."""
    publisher = Publisher((PLAIN, PAIR, NUMERIC, KEYLESS, UNIQUE))
    transactions = assembled(publisher.run(wishes))
    traced = _trace(transactions, publisher.plans.view())
    assert [one.seq for one in traced] == list(range(1, len(transactions) + 1))


def test_of_many_dependencies_the_latest_are_listed() -> None:
    """A transaction that meets more than the limit lists the nearest and counts the others."""
    source = Source(is_full=False, is_enforced=False)
    many = DEPENDS_ON_LIMIT + 5
    wishes = [
        wish for key in range(many) for wish in (FamilyOp("insert", CHILD, key, None), FamilyOp("commit", 1, 0, 0))
    ]
    wishes += [FamilyOp("update", CHILD, key, None) for key in range(many)]
    source.run(wishes)
    last = _trace(source.transactions, source.plans.view())[-1]
    assert [before.seq for before in last.depends_on] == list(range(many, 5, -1))
    assert {before.changes for before in last.depends_on} == {1}
    assert last.left_out == 5


def test_a_large_transaction_is_a_barrier() -> None:
    """What comes in pieces depends on everything before, and everything later on it."""
    source = Source(is_full=False, is_enforced=False)
    source.run([FamilyOp("insert", CHILD, 1, None)])
    (transaction,) = source.transactions
    lineage = TransactionGraph(1000)
    lineage.add(transaction, source.plans.view())
    large = lineage.add_alone(transaction, BarrierReason.LARGE)
    later = lineage.add(transaction, source.plans.view())
    for one, before in ((large, 1), (later, 2)):
        assert [(at.seq, at.kind, at.name, at.changes) for at in one.depends_on] == [(before, "barrier", "large", 0)]


def test_a_wide_transaction_takes_its_tables() -> None:
    """Above the threshold keys are not looked at: the table counts, before and after."""
    source = Source(is_full=False, is_enforced=False)
    for keys in ((1,), (2, 3, 4), (5,)):
        source.run([FamilyOp("insert", CHILD, key, None) for key in keys])
    lineage = TransactionGraph(table_lock_threshold=2)
    view = source.plans.view()
    traced = [lineage.add(transaction, view) for transaction in source.transactions]
    found = [[(at.seq, at.kind, at.table) for at in one.depends_on] for one in traced]
    assert found == [[], [(1, "table", "s.t2")], [(2, "table", "s.t2")]]


def test_a_wide_child_refers_to_any_parent() -> None:
    """A transaction that takes a child's table meets every parent before, and every parent that goes after."""
    source = Source(is_full=False, is_enforced=False)
    source.run([FamilyOp("insert", PARENT, key, None) for key in (1, 2)])
    source.run([FamilyOp("insert", CHILD, key, 1) for key in (1, 2, 3)])
    source.run([FamilyOp("delete", PARENT, 2, None)])
    lineage = TransactionGraph(table_lock_threshold=2)
    view = source.plans.view()
    lineage.use(view.current)
    traced = [lineage.add(transaction, view) for transaction in source.transactions]
    found = [[(at.seq, at.kind) for at in one.depends_on] for one in traced]
    assert found == [[], [(1, "foreign key")], [(2, "foreign key"), (1, "key")]]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last keys are remembered: twice as many as asked for at most, and those asked for always."""
    monkeypatch.setattr(lineages, "Holders", lambda: Holders(remembered=50))
    source = Source(is_full=False, is_enforced=False)
    wishes = []
    for key in [*range(200), 199, 151, 10]:
        wishes += [FamilyOp("insert", CHILD, key, None), FamilyOp("update", CHILD, key, None)]
        wishes.append(FamilyOp("commit", CHILD, 0, None))
    source.run(wishes)
    lineage = TransactionGraph(1000)
    view = source.plans.view()
    traced = [lineage.add(transaction, view) for transaction in source.transactions]
    assert [[at.seq for at in one.depends_on] for one in traced[-3:]] == [[200], [152], []]
    held = lineage._past.holders
    assert len(held._young) + len(held._old) <= 100
