"""Dependencies between batches, from the messages alone: the model that the dependency check must equal.

In go batches as test streams make them; out come tables by the publisher's OID and keys as the planner holds them. The
reference decoder reads the messages, and the lists of a `Spec` define which texts are one key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.model import FRAME_HEADER_BYTES, Transaction
from parapply.plan.batch import Batch
from parapply.plan.keys import key_reader
from parapply.plan.table import Lane, Plans
from parapply.wire.decode import decode
from parapply.wire.messages import Delete, Insert, Truncate, TupleData, Update
from parapply.wire.rows import NULL, Row
from tests import build
from tests.unit.changes_model import SPECS, Spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from parapply.plan.keys import Key
    from parapply.plan.table import TablePlan

BY_OID = {spec.oid: spec for spec in SPECS}
#: Tables that are taken whole.
WIDE = {spec.oid for spec in SPECS if spec.is_exclusive or spec.lane is not Lane.SET}

#: Per batch and published table the keys that are late because of it.
Late = dict[int, dict[int, set["Key"]]]


def touched(batch: Batch) -> set[tuple[int, object]]:
    """Return every table and key that a batch's frames name, by the reference decoder; a truncated table as a whole."""
    found: set[tuple[int, object]] = set()
    for message in _messages(batch):
        if isinstance(message, Truncate):
            found |= {(oid, "all") for oid in message.relation_oids}
        else:
            spec = BY_OID[message.relation_oid]
            found.add((spec.oid, "any"))
            found |= {(spec.oid, key) for key in _keys(spec, message)}
    return found


def splittable(batch: Batch) -> set[int]:
    """Return the tables in which changes of one key do not depend on another key's, by the frames alone.

    No row moves to another key, and all changes were sent with the same columns.
    """
    widths: dict[int, set[int]] = {}
    moved = set()
    for message in _messages(batch):
        if not isinstance(message, Truncate):
            spec = BY_OID[message.relation_oid]
            widths.setdefault(spec.oid, set()).update(len(row) for row in _rows(message))
            if len(_keys(spec, message)) > 1:
                moved.add(spec.oid)
    return {oid for oid, found in widths.items() if len(found) == 1 and BY_OID[oid].keys} - moved - WIDE


def wire_key(spec: Spec, number: int) -> Key:
    """Return a key as the planner holds it."""
    plan = spec.plan(0)
    row: Row = [NULL] * len(plan.columns)
    for position, text in zip(plan.key_positions, spec.keys[number][0], strict=True):
        row[position] = len(text).to_bytes(4, "big") + text
    return key_reader(plan)(row)


def common(earlier: Batch, later: Batch) -> dict[int, tuple[str, set[Key]]]:
    """Return by the messages alone where two batches meet: per published table the kind and the common keys."""
    first, second = touched(earlier), touched(later)
    tables = {oid for oid, _ in first} & {oid for oid, _ in second}
    found: dict[int, tuple[str, set[Key]]] = {oid: ("table", set()) for oid in tables & WIDE}
    for oid, key in first & second:
        if isinstance(key, int) and oid not in WIDE:
            found.setdefault(oid, ("key", set()))[1].add(wire_key(BY_OID[oid], key))
    return found


def put_off(batch: Batch, in_flight: Iterable[Batch]) -> tuple[set[int], Late]:
    """Return which batches a new one waits for, and per batch and published table the keys late because of it."""
    waits: set[int] = set()
    late: Late = {}
    split = splittable(batch)
    for earlier in in_flight:
        if earlier.is_barrier or batch.is_barrier:
            waits.add(earlier.seq)
            continue
        for oid, (kind, keys) in common(earlier, batch).items():
            if kind == "key" and oid in split:
                late.setdefault(earlier.seq, {})[oid] = keys
            else:
                waits.add(earlier.seq)
    if late and _is_all_late(batch, split, late):
        return waits | late.keys(), {}
    return waits, late


def _is_all_late(batch: Batch, split: set[int], late: Late) -> bool:
    """Return whether nothing is left to apply before the late keys: then the batch waits without a worker."""
    put_off_keys: dict[int, set[Key]] = {}
    for tables in late.values():
        for oid, keys in tables.items():
            put_off_keys.setdefault(oid, set()).update(keys)
    for oid, key in touched(batch):
        if oid not in split or (isinstance(key, int) and wire_key(BY_OID[oid], key) not in put_off_keys.get(oid, ())):
            return False
    return True


def _messages(batch: Batch) -> Iterator[Insert | Update | Delete | Truncate]:
    for transaction in batch.transactions:
        for change in transaction.changes:
            if isinstance(change, bytes):
                message = decode(change[FRAME_HEADER_BYTES:])
                assert isinstance(message, Insert | Update | Delete | Truncate)
                yield message


def _rows(message: Insert | Update | Delete) -> list[TupleData]:
    """Return the old row, if it was sent, and the new one, if there is one."""
    sides = [getattr(message, side, None) for side in ("key", "old", "new")]
    return [row for row in sides if row is not None]


def _keys(spec: Spec, message: Insert | Update | Delete) -> set[int]:
    """Return the keys of the old and the new row; the number of columns shows which variant they are of."""
    found: set[int] = set()
    texts: dict[str, bytes | None] = {}
    for row in _rows(message):
        relation = spec.relation(int(len(row) < len(spec.relation(0).columns)))
        values = {column.name: cell.value for column, cell in zip(relation.columns, row, strict=True)}
        # A value unchanged in the new row is in the old one.
        texts |= {name: text for name in spec.facts.key_columns if (text := values[name]) is not None}
        if spec.keys:
            found.add(spec.key_of(tuple([texts[name] or b"" for name in spec.facts.key_columns])))
    return found


def batch_of(seq: int, plan: TablePlan, *keys: bytes) -> Batch:
    """Return a batch of one transaction that inserts these keys."""
    batch = Batch(seq)
    fill(batch, plan, *keys)
    return batch


def fill(batch: Batch, plan: TablePlan, *keys: bytes) -> None:
    """Add a transaction that inserts these keys."""
    plans = Plans()
    plans.current[plan.relation.oid] = plan
    transaction = Transaction(batch.seq, batch.seq, batch.seq)
    transaction.end_lsn = batch.seq
    names = [column.name for column in plan.relation.columns]
    for key in keys:
        cells = [build.text(key if name in plan.facts.key_columns else b"v") for name in names]
        transaction.changes.append(build.xlog_data(build.insert(build.row(*cells), oid=plan.relation.oid)))
    batch.add(transaction, plans)
