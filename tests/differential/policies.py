"""Random local changes under random policies: sets and merged transactions leave what one change after the other does.

In go a seed and servers; out comes nothing, or an AssertionError that says which rows or records differ. A round has
many small cases, each a schema with tables and policies of its own, in one stream that daemons in several settings
apply to targets with the same local changes. The reference applies the stream row by row, one transaction at a time, as
`parallel = "never"` says, and must leave what a model leaves.

A conflict that a later change of the same batch takes back may stay unseen there (docs/CONFLICTS.md, "Limits"). The
reference has it, and `_may_hide` knows which ones those can be: a table is compared up to the first of them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.differential.policy_model import Change, PolicyModel
from tests.fixtures.conflict_lab import ConflictCase, ConflictLab, ConflictVariant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.differential.case import Servers
    from tests.fixtures.conflict_lab import ConflictOutcome

    Row = tuple[int, ...]
    #: SQL, and the changes of the stream that it makes.
    _Change = tuple[str, list[Change]]

_VALUES: Final = 10
_TRANSACTIONS: Final = 10
_TABLES_OF_A_CASE: Final = 3
_UNIQUE_TYPES: Final = frozenset({"insert_exists", "update_exists", "multiple_unique_conflicts"})
_NEVER: Final = 1 << 30
#: Time at which a client has written the rows that exist before the first transaction.
_BEFORE: Final = -1.0
_DROPPING: Final = ("skip", "keep_local")
_NAME, _TYPE, _TABLE, _LOCAL_ROW, _CONSTRAINTS, _XID, _CHANGE_NO, _OUTCOME = 0, 1, 2, 5, 8, 10, 12, 14


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A table: three columns of integers, the first one the key where there is one.

    Attributes:
        name: of the table.
        sql: that makes it on both sides.
        unique: column positions of unique indexes on the publisher.
        local_unique: the same, where only the target has them.
        local_sql: that makes them.
        leaves: names of its partitions, which hold the keys below and above the middle.
        parent: the table that its second column refers to.
    """

    name: str
    sql: str
    unique: tuple[int, ...] = ()
    local_unique: tuple[int, ...] = ()
    local_sql: str = ""
    leaves: tuple[str, ...] = ()
    parent: str = ""

    @property
    def is_keyed(self) -> bool:
        return 0 in self.unique

    def is_refused(self, row: Row, rows: Sequence[Row], *, on_target: bool) -> bool:
        """Return whether a unique index refuses a row beside others."""
        positions = self.unique + (self.local_unique if on_target else ())
        return any(
            row[position] == other[position] and (position == 0 or self.leaf(row) == self.leaf(other))
            for position in positions
            for other in rows
        )

    def leaf(self, row: Row) -> str:
        """Return the name under which a row's changes come."""
        return self.leaves[row[0] > _VALUES // 2] if self.leaves else self.name


_KINDS: Final = (
    _Kind(name="one", sql="CREATE TABLE one (a int PRIMARY KEY, b int UNIQUE, c int)", unique=(0, 1)),
    _Kind(name="two", sql="CREATE TABLE two (a int PRIMARY KEY, b int UNIQUE, c int UNIQUE)", unique=(0, 1, 2)),
    _Kind(
        name="late", sql="CREATE TABLE late (a int PRIMARY KEY, b int, c int)", unique=(0,), local_unique=(1,),
        local_sql="CREATE UNIQUE INDEX ON late (b)",
    ),
    _Kind(name="bare", sql="CREATE TABLE bare (a int, b int, c int); ALTER TABLE bare REPLICA IDENTITY FULL"),
    _Kind(
        name="full", sql="CREATE TABLE fully (a int PRIMARY KEY, b int UNIQUE, c int);"
        ' ALTER TABLE fully REPLICA IDENTITY FULL; ALTER TABLE fully RENAME TO "full"', unique=(0, 1),
    ),
    _Kind(
        name="part", sql="CREATE TABLE part (a int PRIMARY KEY, b int, c int) PARTITION BY RANGE (a);"
        f" CREATE TABLE low PARTITION OF part FOR VALUES FROM (MINVALUE) TO ({_VALUES // 2 + 1});"
        f" CREATE TABLE high PARTITION OF part FOR VALUES FROM ({_VALUES // 2 + 1}) TO (MAXVALUE);"
        " CREATE UNIQUE INDEX ON low (b); CREATE UNIQUE INDEX ON high (b)",
        unique=(0, 1), leaves=("low", "high"),
    ),
    _Kind(
        name="child", sql="CREATE TABLE parent (a int PRIMARY KEY); INSERT INTO parent SELECT generate_series(0, 9);"
        " CREATE TABLE child (a int PRIMARY KEY, b int REFERENCES parent, c int UNIQUE)",
        unique=(0, 2),
    ),
)  # fmt: skip


@dataclass(kw_only=True)
class _Rows:
    """Contents of a table on one side.

    Attributes:
        kind: of the table.
        on_target: whether a client writes these rows behind the stream's back.
        rows: now.
        now: the time, as the model counts it.
        times: of rows written since the first transaction. Equal rows of a table without a key have the same, because
            no one says which of them a change is about.
    """

    kind: _Kind
    on_target: bool
    rows: list[Row] = field(default_factory=list)
    now: float = _BEFORE
    times: dict[Row, float] = field(default_factory=dict)

    def time(self, row: Row) -> float:
        """Return when a row was written."""
        return self.times.get(row, _BEFORE)

    def _write(self, new: Row, others: list[Row]) -> bool:
        """Add a row to the others, if this side takes it; say whether it does."""
        is_refused = self.kind.is_refused(new, others, on_target=self.on_target)
        if is_refused or (self.on_target and new in others and self.time(new) != self.now):
            return False
        self.rows = [*others, new]
        self.times[new] = self.now
        return True

    def change(self, chooser: random.Random) -> _Change | None:
        """Draw a change and make it; None if this side would not take it."""
        if chooser.random() < 0.01 and not self.kind.leaves:
            self.rows.clear()
            return f'TRUNCATE "{self.kind.name}"', [Change(table=self.kind.name, operation="truncate")]
        new = _row(chooser)
        if not self.rows or chooser.random() < 0.25:
            return self._insert(new)
        old = chooser.choice(self.rows)
        if chooser.random() < 0.3:
            self.rows.remove(old)
            change = Change(table=self.kind.leaf(old), operation="delete", old=old)
            return f'DELETE FROM "{self.kind.name}" WHERE {self._is_row(old)}', [change]
        kept = chooser.choice(((0,), (0, 1), (0, 2), (0,), (), (1,)))
        return self._update(old, tuple([old[at] if at in kept else value for at, value in enumerate(new)]))

    def _insert(self, new: Row) -> _Change | None:
        if not self._write(new, self.rows):
            return None
        change = Change(table=self.kind.leaf(new), operation="insert", new=new)
        return f'INSERT INTO "{self.kind.name}" VALUES {new}', [change]

    def _update(self, old: Row, new: Row) -> _Change | None:
        others = list(self.rows)
        others.remove(old)
        if not self._write(new, others):
            return None
        before, after = self.kind.leaf(old), self.kind.leaf(new)
        changes = [Change(table=after, operation="update", old=old, new=new)]
        if before != after:
            # A move to another partition comes as a DELETE and an INSERT.
            changes = [
                Change(table=before, operation="delete", old=old),
                Change(table=after, operation="insert", new=new),
            ]
        return f'UPDATE "{self.kind.name}" SET (a, b, c) = ROW{new} WHERE {self._is_row(old)}', changes

    def _is_row(self, row: Row) -> str:
        if self.kind.is_keyed:
            return f"a = {row[0]}"
        same = " AND ".join(f"{column} = {value}" for column, value in zip("abc", row, strict=True))
        return f'ctid = (SELECT ctid FROM "{self.kind.name}" WHERE {same} LIMIT 1)'


def _row(chooser: random.Random) -> Row:
    return tuple([chooser.randrange(_VALUES) for _ in range(3)])


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A case, its changes by transaction, and the tables of the target before the first of them."""

    case: ConflictCase
    changes: Sequence[Sequence[Change]]
    target: Sequence[_Rows]

    def __str__(self) -> str:
        one = self.case
        settings = "\n".join(f"  {name} = {policy}" for name, policy in one.policies.items())
        pairs = enumerate(zip(one.transactions, one.between, strict=True))
        texts = "\n".join(f"{number}: {text}\n  target: {local}" for number, (text, local) in pairs)
        return (
            f"{one.name}\n{settings}\n-- both\n{one.tables}\n-- target\n{one.target_tables}\n-- before\n{one.before}\n"
            f"-- publisher\n{texts}"
        )


def _draw(name: str, chooser: random.Random, *, stops: bool, is_newest: bool) -> _Drawn:
    kinds = chooser.sample(_KINDS, _TABLES_OF_A_CASE)
    source = [_Rows(kind=kind, on_target=False) for kind in kinds]
    tables = [kind.sql for kind in kinds] + ["CREATE TABLE tx (n int PRIMARY KEY, xid bigint)"]
    for table in source:
        for _ in range(chooser.randrange(10)):
            row = _row(chooser)
            if not table.kind.is_refused(row, table.rows, on_target=True):
                table.rows.append(row)
                tables.append(f'INSERT INTO "{table.kind.name}" VALUES {row}')
    target = [_Rows(kind=table.kind, on_target=True, rows=list(table.rows)) for table in source]
    before = _local_changes(target, chooser, _BEFORE)
    transactions, changes, between = [], [], []
    for number in range(_TRANSACTIONS):
        texts, made_changes = [], []
        for _ in range(chooser.choice((1, 1, 2, 3, 6))):
            if made := chooser.choice(source).change(chooser):
                texts.append(made[0])
                made_changes += made[1]
        texts.append(f"INSERT INTO tx VALUES ({number}, pg_current_xact_id()::text::bigint)")
        transactions.append("; ".join(texts))
        changes.append(made_changes)
        is_written_to = chooser.random() < 0.3 or number == _TRANSACTIONS - 1
        between.append(_local_changes(target, chooser, number + 0.5) if is_written_to else "")
    names = [name for kind in kinds for name in kind.leaves or (kind.name,)]
    rows = " UNION ALL ".join(f"SELECT '{name}', t::text FROM \"{name}\" AS t" for name in names)
    case = ConflictCase(
        name=name, tables="; ".join(tables), policies=_policies(chooser, stops=stops, is_newest=is_newest),
        target_tables="; ".join([*tables, *(kind.local_sql for kind in kinds if kind.local_sql)]),
        transactions=transactions, rows=(), found=(), before=before, between=between,
        query=f"SELECT * FROM ({rows} UNION ALL SELECT 'tx', t::text FROM tx AS t) AS t ORDER BY 1, 2",
        policy_tables=names,
    )  # fmt: skip
    return _Drawn(case=case, changes=changes, target=target)


def _local_changes(target: Sequence[_Rows], chooser: random.Random, now: float) -> str:
    for table in target:
        table.now = now
    made = [chooser.choice(target).change(chooser) for _ in range(chooser.randrange(8))]
    return "; ".join(one[0] for one in made if one)


def _policies(chooser: random.Random, *, stops: bool, is_newest: bool) -> dict[str, str]:
    exists = ["apply_remote", "apply_remote", *_DROPPING]
    missing = ["apply_remote", "apply_remote", "skip"]
    deletes = ["skip"]
    if is_newest:
        exists += ["last_update_wins"] * 3
    differs = [*exists]
    if stops:
        for some in (exists, missing, deletes, differs):
            some.append("error")
    policies = {name: chooser.choice(exists) for name in sorted(_UNIQUE_TYPES)}
    policies |= {"update_missing": chooser.choice(missing), "delete_missing": chooser.choice(deletes)}
    for name in ("update_origin_differs", "delete_origin_differs"):
        if chooser.random() < 0.3:
            policies[name] = chooser.choice(differs)
    return policies


def run_policies(seed: int, servers: Servers, *, n_cases: int) -> Counter[str]:
    """Run the cases of a seed, and compare what each daemon leaves with what the reference leaves.

    Args:
        seed: of everything. Every third one has last_update_wins, for which no transactions are merged, and every fifth
            one a single case, whose policies may stop it.
        servers: of publisher and targets.
        n_cases: how many others have.

    Returns:
        how many tables were compared to their end, or up to a conflict that may stay unseen, and records by type.

    Raises:
        AssertionError: a daemon failed, or left other rows or records than the reference.
    """
    try:
        return _run(seed, servers, n_cases)
    except BaseException as error:
        error.add_note(f"again: python -m tests.differential --part policies --seed {seed}")
        raise


def _run(seed: int, servers: Servers, n_cases: int) -> Counter[str]:
    chooser = random.Random(f"policies {seed}")
    stops = seed % 5 == 4
    drawn = [
        _draw(f"case_{number}", random.Random(f"policies {seed} {number}"), stops=stops, is_newest=seed % 3 == 2)
        for number in range(1 if stops else n_cases)
    ]
    row_by_row = {
        f'apply.tables."{one.case.name}.{table}".parallel': "never" for one in drawn for table in one.case.policy_tables
    }
    variants = [
        ConflictVariant(name="reference", order="preserve", workers=1, settings=row_by_row),
        ConflictVariant(name="merged", order="preserve", workers=1, settings={"apply.max_batch_transactions": 1000}),
        ConflictVariant(
            # Where one is stopped, relaxed order goes on with others.
            order="preserve" if stops else chooser.choice(("preserve", "relaxed")),
            workers=4,
            settings={"apply.max_batch_transactions": chooser.choice((1, 3, 30))},
        ),
    ]
    lab = ConflictLab(servers.source, servers.target, [one.case for one in drawn], variants)
    reference = lab.outcomes["reference"]
    assert reference.code in ((0, 5) if stops else (0,)), reference.problem
    counts = Counter(str(row[_TYPE]) for row in reference.history)
    for one in drawn:
        try:
            counts += _check_model(one, reference)
            for variant in variants[1:]:
                counts += _check(one, reference, lab.outcomes[str(variant)])
        except AssertionError as error:
            error.add_note(str(one))
            raise
    return counts


def _check(one: _Drawn, reference: ConflictOutcome, found: ConflictOutcome) -> Counter[str]:
    """Compare a case table by table: what may stay unseen in one is of no matter to the others, unless it stops all."""
    counts: Counter[str] = Counter()
    numbers = _numbers(one, reference, found)
    hidden = {table: _hidden_from(one, table, reference, numbers) for table in one.case.policy_tables}
    may_stop = "error" in one.case.policies.values()
    if may_stop:
        hidden = dict.fromkeys(hidden, min(hidden.values()))
    if not may_stop or min(hidden.values()) == _NEVER:
        assert found.code == reference.code, found.problem
    for table, hidden_from in hidden.items():
        wanted, records = (_records(one, table, some, numbers, hidden_from) for some in (reference, found))
        assert records == wanted, f"records of {table}, compared up to {hidden_from}:\n{_shown(records, wanted)}"
        if hidden_from == _NEVER:
            wanted, records = (
                [row for row in some.rows[one.case.name] if row[0] == table] for some in (reference, found)
            )
            assert records == wanted, f"rows of {table}:\n{_shown(records, wanted)}"
        counts["tables compared to the end" if hidden_from == _NEVER else "up to what may stay unseen"] += 1
    return counts


def _check_model(one: _Drawn, reference: ConflictOutcome) -> Counter[str]:
    """Compare what the reference left with the model, if its policies are the model's."""
    if "error" in one.case.policies.values():
        return Counter()
    leaves = [(name, table) for table in one.target for name in table.kind.leaves or (table.kind.name,)]
    model = PolicyModel(
        policies=one.case.policies,
        unique={name: table.kind.unique + table.kind.local_unique for name, table in leaves},
    )
    for name, table in leaves:
        model.load(name, [(row, table.time(row)) for row in table.rows if table.kind.leaf(row) == name])
    for number, changes in enumerate(one.changes):
        for change_no, change in enumerate(changes, 1):
            model.apply(number, change_no, change)
    numbers = _numbers(one, reference)
    found = [
        (_number(row, numbers), int(row[_CHANGE_NO]), str(row[_TYPE]), str(row[_OUTCOME]))
        for row in reference.history
        if row[_NAME] == one.case.name
    ]
    assert found == model.records, f"records and the model's:\n{_shown(found, model.records)}"
    for name, _ in leaves:
        texts = sorted(text for table, text in reference.rows[one.case.name] if table == name)
        wanted = sorted(f"({','.join(map(str, row))})" for row in model.rows(name))
        assert texts == wanted, f"rows of {name} and the model's:\n{_shown(texts, wanted)}"
    return Counter({"tables of the model": len(leaves)})


def _records(
    one: _Drawn, table: str, some: ConflictOutcome, numbers: Mapping[int, int], before: int
) -> list[tuple[Any, ...]]:
    mine = [row for row in some.history if (row[_NAME], row[_TABLE]) == (one.case.name, table)]
    return [row for row in mine if _number(row, numbers) < before]


def _hidden_from(one: _Drawn, table: str, reference: ConflictOutcome, numbers: Mapping[int, int]) -> int:
    """Return the number of the first transaction with a conflict in a table that a batch may not see."""
    rows = _records(one, table, reference, numbers, _NEVER)
    return min((_number(row, numbers) for row in rows if _may_hide(one, row, numbers)), default=_NEVER)


def _numbers(one: _Drawn, *outcomes: ConflictOutcome) -> Mapping[int, int]:
    """Return the transactions' numbers by xid."""
    texts = [text for outcome in outcomes for table, text in outcome.rows[one.case.name] if table == "tx"]
    pairs = [text.strip("()").split(",") for text in texts]
    return {int(xid): int(number) for number, xid in pairs}


def _number(row: tuple[Any, ...], numbers: Mapping[int, int]) -> int:
    # A transaction that was stopped is the one after those that have come.
    return numbers.get(int(row[_XID]), len(numbers))


def _may_hide(one: _Drawn, row: tuple[Any, ...], numbers: Mapping[int, int]) -> bool:
    """Return whether a later change takes back what a conflict is made of, so that a batch of both may not see it."""
    number, change_no, table = _number(row, numbers), int(row[_CHANGE_NO]), row[_TABLE]
    own = one.changes[number][change_no - 1]
    later = [*one.changes[number][change_no:], *(each for some in one.changes[number + 1 :] for each in some)]
    later = [change for change in later if change.table == table]
    touched = {key for change in later for key in change.keys}
    if any(change.operation == "truncate" for change in later):
        return True
    if row[_TYPE] not in _UNIQUE_TYPES:
        # A row that its own transaction wrote is missing because of a conflict, whose record a stop took back.
        before = [change for change in one.changes[number][: change_no - 1] if change.table == table]
        is_result = any(change.keys & own.keys for change in before)
        return is_result or (table == "bare" and any(change.rows & own.rows for change in later))
    rows = row[_LOCAL_ROW] if isinstance(row[_LOCAL_ROW], list) else [row[_LOCAL_ROW]]
    local = {int(each["a"]) for each in rows}
    is_key_only = local <= own.keys and len(row[_CONSTRAINTS]) == 1 and row[_CONSTRAINTS][0].endswith("pkey")
    return not is_key_only and bool(touched & (own.keys | local))


def _shown(found: Sequence[object], wanted: Sequence[object]) -> str:
    lines = [f"  only found: {row}" for row in found if row not in wanted]
    lines += [f"  only wanted: {row}" for row in wanted if row not in found]
    return "\n".join(lines) or f"the same in another order: {json.dumps(found, default=str)}"
