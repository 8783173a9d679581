"""A publisher for tests: valid random changes as the frames of a stream, and the rows they lead to.

An `Op` is a wish; the `Publisher` turns it into what is possible in its state, so that every list of wishes is a valid
stream and shrinks well.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import strategies as st

from parapply.plan.batch import Batch
from parapply.plan.table import Plans
from parapply.wire.assembler import Assembler
from tests import build
from tests.unit.changes_model import SPECS, Side, Spec, Values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parapply.model import Transaction

KINDS = ("put", "put", "put", "update", "update", "delete", "move", "commit", "announce", "truncate")


class Op(NamedTuple):
    """One wish."""

    kind: str
    table: int
    key: int = 0
    other_key: int = 0
    form: int = 0  # which of the texts of a key
    value: bytes | None = b"v"
    is_b_unchanged: bool = False
    is_key_unchanged: bool = False
    is_old_sent: bool = False


@st.composite
def ops(draw: st.DrawFn, specs: Sequence[Spec] = SPECS, kinds: Sequence[str] = KINDS) -> list[Op]:
    """Return lists of wishes for a few of these tables and keys: changes that never meet prove nothing."""
    tables = draw(st.lists(st.integers(0, len(specs) - 1), min_size=1, max_size=3), label="tables")
    n_keys = draw(st.integers(1, 4), label="keys")
    values = [None, b"", b"v", b"w"]
    one = one_of_all(kinds, tables, range(n_keys), range(n_keys + 1), range(3), values, *[[False, True]] * 3)
    return [Op(*parts) for parts in draw(st.lists(one, min_size=draw(st.integers(0, 20)), max_size=40), label="wishes")]


def one_of_all(*parts: Sequence[object]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return one of each part by a single draw, each combination as likely: draws cost more than what is tested."""

    def combination(number: int) -> tuple[object, ...]:
        chosen: list[object] = []
        for part in reversed(parts):
            number, at = divmod(number, len(part))
            chosen.append(part[at])
        return tuple(reversed(chosen))

    return st.integers(0, prod(map(len, parts)) - 1).map(combination)


class Publisher:
    """Writes frames and keeps the rows; `side` is what the target must equal."""

    def __init__(self, specs: Sequence[Spec] = SPECS) -> None:
        """Start with the rows of `Side`, nothing announced and no transaction open."""
        self.specs = specs
        self.side = Side(specs)
        self.frames: list[bytes] = []
        self.plans = Plans()
        self._variant = dict.fromkeys([spec.oid for spec in specs], 0)
        self._announced: set[int] = set()
        self._lsn = 0x1000
        self._is_open = False

    def run(self, wishes: Iterable[Op]) -> list[bytes]:
        """Do what is possible of each wish, commit, and return all frames."""
        for op in wishes:
            spec = self.specs[op.table]
            if op.kind == "commit":
                # Without changes too: publishers before 15 send empty transactions.
                self._begin()
                self.commit()
            elif op.kind == "announce":
                self._variant[spec.oid] ^= 1
                self._announced.discard(spec.oid)
            else:
                self.change(spec, op)
        self.commit()
        return self.frames

    def change(self, spec: Spec, op: Op) -> None:
        """Write one change: of a row that exists, or an insert of one that does not."""
        if op.kind == "truncate":
            others = [other for other in self.specs if other.lane is not spec.lane][: op.key]
            for each in (spec, *others):
                self._announce(each)
            self._write(spec, build.truncate(spec.oid, *[other.oid for other in others]))
            return
        key = op.key % len(spec.keys) if spec.keys else 0
        row = self.side.rows[spec.oid].get(key)
        self._announce(spec)
        if row is None:
            if op.kind in ("put", "update"):
                self._write(spec, build.insert(self._row(spec, self._new(spec, key, op)), oid=spec.oid))
        elif op.kind == "delete":
            self._write(spec, build.delete(oid=spec.oid, **self._before(spec, row)))
        elif op.kind == "move":
            other = op.other_key % len(spec.keys)
            if other not in self.side.rows[spec.oid]:
                self._update(spec, row, other, op)
        else:
            self._update(spec, row, key, op)

    def _update(self, spec: Spec, row: Values, key: int, op: Op) -> None:
        new = self._new(spec, key, op)
        unchanged = {"b"} if op.is_b_unchanged else set()
        if op.is_key_unchanged:
            unchanged |= {name for name in spec.facts.key_columns if new[name] == row[name]}
        names = spec.facts.key_columns
        is_old_needed = any(new[name] != row[name] for name in names) or bool(unchanged & set(names))
        is_old_sent = is_old_needed or (op.is_old_sent and spec.identity == "f")
        before = self._before(spec, row, is_leaf=not op.is_old_sent) if is_old_sent else build.Before()
        self._write(spec, build.update(self._row(spec, new, unchanged), oid=spec.oid, **before))

    def _new(self, spec: Spec, key: int, op: Op) -> Values:
        forms = spec.keys[key] if spec.keys else ((),)
        texts: Values = dict(zip(spec.facts.key_columns, forms[op.form % len(forms)], strict=True))
        return {**texts, "a": op.value, "b": op.value}

    def _before(self, spec: Spec, row: Values, *, is_leaf: bool = False) -> build.Before:
        """Return the old row: whole under REPLICA IDENTITY FULL, but for partitions with another identity (T-28)."""
        if spec.identity == "f" and not is_leaf:
            return {"old": self._row(spec, row)}
        keys = {name: value for name, value in row.items() if name in spec.facts.key_columns}
        return {"key": self._row(spec, keys)}

    def _row(self, spec: Spec, values: Values, unchanged: Iterable[str] = ()) -> bytes:
        cells = []
        for column in spec.relation(self._variant[spec.oid]).columns:
            value = values.get(column.name)
            cells.append(build.null() if value is None else build.text(value))
            if column.name in unchanged:
                cells[-1] = build.unchanged()
        return build.row(*cells)

    def _begin(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._send(build.begin(final_lsn=self._lsn, xid=self._lsn))

    def commit(self) -> None:
        """End the transaction that is open, if any."""
        if self._is_open:
            self._is_open = False
            self._send(build.commit(commit_lsn=self._lsn, end_lsn=self._lsn + 0x30))
            self._lsn += 0x100

    def _announce(self, spec: Spec) -> None:
        self._begin()
        if spec.oid in self._announced:
            return
        self._announced.add(spec.oid)
        plan = spec.plan(self._variant[spec.oid])
        self.plans.known.setdefault(plan.relation, plan)
        columns = [
            build.ColumnSpec(column.name, column.type_oid, column.type_modifier, int(column.is_key))
            for column in plan.relation.columns
        ]
        self._send(
            build.relation(*columns, oid=spec.oid, namespace="s", name=spec.name, replica_identity=spec.identity)
        )

    def _write(self, spec: Spec, payload: bytes) -> None:
        self._send(payload)
        self.side.apply(self.frames[-1], spec.relation(self._variant[spec.oid]))

    def _send(self, payload: bytes) -> None:
        self.frames.append(build.xlog_data(payload))


def assembled(frames: Iterable[bytes], piece_bytes: int = 1 << 30) -> list[Transaction]:
    """Return the transactions or pieces of a whole stream."""
    return Assembler(piece_bytes).push(frames)


def batches(transactions: Iterable[Transaction], plans: Plans, sizes: Iterable[int]) -> list[Batch]:
    """Merge a number of transactions into each batch; the rest are batches of one."""
    left = list(transactions)
    wanted = iter(sizes)
    done: list[Batch] = []
    while left:
        batch = Batch(len(done) + 1)
        for _ in range(next(wanted, 1)):
            if left:
                batch.add(left.pop(0), plans)
        batch.close()
        done.append(batch)
    return done
