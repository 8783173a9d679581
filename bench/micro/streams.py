"""Streams for the planner's benchmark: frames as a publisher sends them, and the plans they are read with.

In goes a number of transactions; out come frames and plans, the same every time. The same frames serve with and without
further indexes or foreign keys, so that the difference is the planner's alone. No server, no I/O.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from parapply.model import Column, Relation
from parapply.plan.table import ColumnFacts, Equality, ForeignKeyFacts, Lane, Plans, TableFacts, UniqueFacts
from parapply.target.catalogue.match import match
from tests import build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# OIDs of pg_type.dat, and their cast names.
_INT4, _INT8, _TEXT, _TIMESTAMPTZ = 23, 20, 25, 1184
_TYPE_NAMES: Final = {_INT4: "int4", _INT8: "int8", _TEXT: "text", _TIMESTAMPTZ: "timestamptz"}
#: Rows that existed before: batches in flight seldom touch the same one.
_ROWS: Final = 1_000_000
_SEED: Final = 20261121
_TRANSACTION_BYTES: Final = 0x200


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Frames and what they are read with.

    Attributes:
        frames: whole CopyData payloads of kind 'w'.
        plans: with every relation known and none announced yet.
        transactions: in the frames.
        changes: rows in the frames.
    """

    frames: list[bytes]
    plans: Plans
    transactions: int
    changes: int


#: Every stream by its name, in the order of the table.
NAMES: Final = ("no further index", "1 unique index", "2 unique indexes", "no foreign key", "2 foreign keys")


def stream(name: str, transactions: int) -> Stream:
    """Return the stream of a name.

    Raises:
        KeyError: there is none of this name.
    """
    makers: dict[str, tuple[Sequence[TableFacts], Callable[[int, random.Random], Iterator[bytes]]]] = {
        "no further index": ([_accounts(0)], _account_changes),
        "1 unique index": ([_accounts(1)], _account_changes),
        "2 unique indexes": ([_accounts(2)], _account_changes),
        "no foreign key": (_shop(is_keyed=False), _order_changes),
        "2 foreign keys": (_shop(is_keyed=True), _order_changes),
    }
    tables, changes_of = makers[name]
    return _stream(tables, changes_of, transactions)


def _stream(
    tables: Sequence[TableFacts], changes_of: Callable[[int, random.Random], Iterator[bytes]], transactions: int
) -> Stream:
    plans = Plans()
    for facts in tables:
        plan = match(_relation(facts), facts)
        # A table that is applied in another way would give figures of something else.
        assert (plan.lane, plan.is_table_exclusive) == (Lane.SET, False), plan.reason
        assert (len(plan.unique_keys), len(plan.foreign_keys)) == (len(facts.unique), len(facts.foreign_keys))
        plans.known[plan.relation] = plan
    # As the daemon says it where no table is serial.
    plans.may_be_serial = False
    chance = random.Random(_SEED)
    frames: list[bytes] = []
    changes = 0
    for number in range(transactions):
        commit_lsn = (number + 1) * _TRANSACTION_BYTES
        messages = list(changes_of(number, chance))
        changes += len(messages)
        announced = [_announcement(facts) for facts in tables] if number == 0 else []
        frames += [
            build.xlog_data(payload)
            for payload in (
                build.begin(final_lsn=commit_lsn, xid=1000 + number),
                *announced,
                *messages,
                build.commit(commit_lsn=commit_lsn, end_lsn=commit_lsn + 0x30),
            )
        ]
    return Stream(frames=frames, plans=plans, transactions=transactions, changes=changes)


def _accounts(n_unique: int) -> TableFacts:
    unique = (_unique("accounts_email_key", "email"), _unique("accounts_tenant_number_key", "tenant", "number"))
    columns = {"id": _INT8, "tenant": _INT4, "number": _INT8, "email": _TEXT, "balance": _INT8}
    return _table(1, "accounts", columns, key=("id",), unique=unique[:n_unique])


def _account_changes(number: int, chance: random.Random) -> Iterator[bytes]:
    """One update of a row and one insert of another; the unique columns come with both."""
    for is_new in (False, True):
        account = _ROWS + number if is_new else chance.randrange(_ROWS)
        row = _row(account, account % 100, account // 100, f"user{account}@example.org", chance.randrange(1000))
        yield build.insert(row, oid=_wire_oid(1)) if is_new else build.update(row, oid=_wire_oid(1))


def _shop(*, is_keyed: bool) -> list[TableFacts]:
    of_customer = _foreign_key("orders_customer_id_fkey", "customer_id", 1, "public.customers")
    of_order = _foreign_key("order_lines_order_id_fkey", "order_id", 2, "public.orders")
    customers = _table(1, "customers", {"id": _INT8, "name": _TEXT, "balance": _INT8}, key=("id",))
    orders = _table(
        2, "orders", {"id": _INT8, "customer_id": _INT8, "placed_at": _TIMESTAMPTZ}, key=("id",),
        foreign_keys=(of_customer,) if is_keyed else (),
    )  # fmt: skip
    lines = _table(
        3, "order_lines", {"order_id": _INT8, "line": _INT4, "article": _INT4, "quantity": _INT4},
        key=("order_id", "line"), foreign_keys=(of_order,) if is_keyed else (),
    )  # fmt: skip
    return [customers, orders, lines]


def _order_changes(number: int, chance: random.Random) -> Iterator[bytes]:
    """One order with three lines, and an update of its customer."""
    customer = chance.randrange(_ROWS)
    yield build.insert(_row(number, customer, "2026-11-21 12:00:00+00"), oid=_wire_oid(2))
    for line in (1, 2, 3):
        yield build.insert(_row(number, line, line, 1), oid=_wire_oid(3))
    yield build.update(_row(customer, f"Customer {customer}", chance.randrange(1000)), oid=_wire_oid(1))


def _table(  # noqa: PLR0913  one place for all that tables differ in
    oid: int,
    name: str,
    columns: dict[str, int],
    *,
    key: tuple[str, ...],
    unique: tuple[UniqueFacts, ...] = (),
    foreign_keys: tuple[ForeignKeyFacts, ...] = (),
) -> TableFacts:
    return TableFacts(
        oid=oid,
        schema="public",
        name=name,
        is_partitioned=False,
        columns=tuple(_column(column, type_oid) for column, type_oid in columns.items()),
        key_columns=key,
        key_is_deferrable=False,
        triggers=(),
        rules=(),
        code=(),
        unique=unique,
        foreign_keys=foreign_keys,
        root_oid=oid,
    )


def _column(name: str, type_oid: int) -> ColumnFacts:
    return ColumnFacts(
        name=name,
        type_sql=f"pg_catalog.{_TYPE_NAMES[type_oid]}",
        type_oid=type_oid,
        base_type_oid=type_oid,
        is_generated=False,
        is_identity_always=False,
        has_equality=True,
        equality=Equality.BYTES,
    )


def _unique(name: str, *columns: str) -> UniqueFacts:
    return UniqueFacts(
        name=name,
        columns=columns,
        equalities=(Equality.BYTES,) * len(columns),
        is_nulls_distinct=True,
        is_partial=False,
        is_exclusion=False,
    )


def _foreign_key(name: str, column: str, parent_oid: int, parent: str) -> ForeignKeyFacts:
    return ForeignKeyFacts(
        name=name,
        columns=(column,),
        parent_oid=parent_oid,
        parent=parent,
        parent_columns=("id",),
        parent_equalities=(Equality.BYTES,),
        is_enforced=True,
        is_cascading=False,
    )


def _wire_oid(oid: int) -> int:
    """Return the publisher's OID of a table: not the target's."""
    return 16384 + oid


def _relation(facts: TableFacts) -> Relation:
    columns = [
        Column(name=column.name, type_oid=column.type_oid, type_modifier=-1, is_key=column.name in facts.key_columns)
        for column in facts.columns
    ]
    return Relation(
        oid=_wire_oid(facts.oid), schema=facts.schema, name=facts.name, replica_identity="d", columns=tuple(columns)
    )


def _announcement(facts: TableFacts) -> bytes:
    columns = [
        build.ColumnSpec(column.name, column.type_oid, -1, int(column.name in facts.key_columns))
        for column in facts.columns
    ]
    return build.relation(*columns, oid=_wire_oid(facts.oid), namespace=facts.schema, name=facts.name)


def _row(*values: object) -> bytes:
    return build.row(*[build.text(str(value).encode()) for value in values])
