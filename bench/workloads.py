"""The workloads: which tables both servers hold, what writes to them, and the settings of parapply for it.

Data only, so that the command line can name them at once; `filling.py` makes tables and backlog. A workload of our own
is two or three scripts in `scripts`: `NAME.schema.sql` for psql, `NAME.load.sql` for pgbench (one transaction a run) or
psql, and `NAME.beside.sql` for psql, which runs at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parapply.demo.load import Script

#: Rows of the one huge transaction of `large`.
LARGE_ROWS: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tables and a load.

    Attributes:
        name: for the command line and for file names.
        text: what it is, for people.
        transactions: of the backlog, unless set otherwise; for a load by psql the rows of its largest statement.
        builtin: pgbench's own tables and this script of it, instead of scripts of ours.
        script: begins the names of its own scripts; empty with `builtin`.
        psql_transactions: of `NAME.load.sql` where psql runs it once; 0 where pgbench runs it, one transaction a run.
        has_beside: `NAME.beside.sql` runs alongside the load.
        state: variables that pgbench keeps for each client from run to run; they start as 0.
        settings: `key=value` for parapply, as for `--set`.
        is_bulk_possible: one UPDATE, one INSERT and one DELETE a table do the same without breaking a unique index
            in between, and are few statements.
    """

    name: str
    text: str
    transactions: int
    builtin: Script | None = None
    script: str = ""
    psql_transactions: int = 0
    has_beside: bool = False
    state: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    is_bulk_possible: bool = True


_FOREIGN_KEYS_STATE: Final = ("serial", "newcomer", "newcomer_before", "first_order", "latest_order", "archived")

_ALL: Final = (
    Workload(name="simple-update", text="pgbench simple-update", transactions=200_000, builtin="simple-update"),
    Workload(name="tpcb", text="pgbench TPC-B", transactions=96_000, builtin="tpcb-like"),
    Workload(name="inserts", text="single-row inserts", transactions=200_000, script="inserts", state=("serial",)),
    Workload(
        name="indexes",
        text="single-row inserts into a table with five indexes beside the primary key",
        transactions=120_000,
        script="indexes",
        state=("serial",),
    ),
    Workload(
        name="hot-rows",
        text="every other transaction updates one of ten counters, the others a random row",
        transactions=160_000,
        script="hot-rows",
    ),
    Workload(
        name="unique-taken",
        text="every transaction frees a value of a second unique column, or gives it to another row",
        transactions=60_000,
        script="unique-taken",
        state=("turn",),
        is_bulk_possible=False,
    ),
    Workload(
        name="family",
        text="a parent and two children inserted in a transaction",
        transactions=120_000,
        script="family",
        state=("serial",),
    ),
    Workload(
        name="many-tables",
        text="an update and an insert in one of a thousand tables, a tenth of them with partitions",
        transactions=30_000,
        script="many-tables",
        state=("serial",),
        is_bulk_possible=False,
    ),
    Workload(
        name="bulk",
        text="an INSERT, an UPDATE of half as many rows and a DELETE of a third as many, a transaction each",
        transactions=600_000,
        script="bulk",
        psql_transactions=3,
    ),
    Workload(
        name="large",
        text="one huge transaction beside small ones",
        transactions=50_000,
        script="large",
        has_beside=True,
    ),
    Workload(
        name="unique-keys",
        text="accounts with two more unique indexes; one transaction in a hundred frees a value for another row",
        transactions=200_000,
        script="unique-keys",
        state=("serial", "freed", "taken"),
        is_bulk_possible=False,
    ),
    Workload(
        name="foreign-keys",
        text="customers, orders and lines; parapply enforces the foreign keys, the built-in one never does",
        transactions=200_000,
        script="foreign-keys",
        state=_FOREIGN_KEYS_STATE,
        settings=("target.session_replication_role=origin",),
    ),
    Workload(
        name="foreign-keys-replica",
        text="customers, orders and lines; the foreign keys are not enforced",
        transactions=200_000,
        script="foreign-keys",
        state=_FOREIGN_KEYS_STATE,
        settings=("target.session_replication_role=replica",),
    ),
)

WORKLOADS: Final[Mapping[str, Workload]] = MappingProxyType({workload.name: workload for workload in _ALL})
