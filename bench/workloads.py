"""The workloads: which tables both servers hold, what writes to them, and the settings of parapply for it.

Data only, so that the command line can name them at once; `filling.py` makes tables and backlog. A workload of our own
is two or three scripts in `scripts`: `NAME.schema.sql` for psql, `NAME.load.sql` for pgbench (one transaction a run) or
psql, and `NAME.beside.sql` for psql, which runs at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
        script: begins the names of its scripts where that is not its own name.
        psql_transactions: of `NAME.load.sql` where psql runs it once; 0 where pgbench runs it, one transaction a run.
        has_beside: `NAME.beside.sql` runs alongside the load.
        state: variables that pgbench keeps for each client from run to run; they start as 0.
        constants: variables of the scripts, where several workloads share these.
        publication: what follows FOR ALL TABLES.
        is_local: systems connect to the publisher by its Unix socket.
        settings: `key=value` for parapply, as for `--set`.
        is_bulk_possible: one UPDATE, one INSERT and one DELETE a table do the same without breaking a unique index
            in between, and are few statements over tables with a primary key.
    """

    name: str
    text: str
    transactions: int
    builtin: Script | None = None
    script: str = ""
    psql_transactions: int = 0
    has_beside: bool = False
    state: tuple[str, ...] = ()
    constants: Mapping[str, int] = field(default_factory=dict)
    publication: str = ""
    is_local: bool = False
    settings: tuple[str, ...] = ()
    is_bulk_possible: bool = True

    @property
    def stem(self) -> str:
        """The begin of the names of its scripts; empty with `builtin`."""
        return "" if self.builtin else self.script or self.name


_FOREIGN_KEYS_STATE: Final = ("serial", "newcomer", "newcomer_before", "first_order", "latest_order", "archived")
#: Long enough that the daemon's start counts for little.
_MANY: Final = 500_000

_ALL: Final = (
    Workload(name="simple-update", text="pgbench simple-update", transactions=_MANY, builtin="simple-update"),
    Workload(
        name="simple-update-socket",
        text="pgbench simple-update, the publisher reached by a Unix socket",
        transactions=200_000,
        builtin="simple-update",
        is_local=True,
    ),
    Workload(name="tpcb", text="pgbench TPC-B", transactions=_MANY, builtin="tpcb-like"),
    Workload(name="inserts", text="single-row inserts", transactions=_MANY, state=("serial",)),
    Workload(
        name="uuid-keys",
        text="single-row inserts with random keys, and an index on time",
        transactions=_MANY,
    ),
    Workload(
        name="indexes",
        text="single-row inserts into a table with five indexes beside the primary key",
        transactions=_MANY,
        state=("serial",),
    ),
    Workload(
        name="deletes",
        text="single-row deletes by the primary key",
        transactions=_MANY,
        state=("serial",),
    ),
    Workload(
        name="wide-rows",
        text="updates of two of 45 columns: numbers, texts, jsonb",
        transactions=100_000,
    ),
    Workload(
        name="toast",
        text="updates of rows whose long text stays as it is, and is not sent",
        transactions=200_000,
    ),
    Workload(
        name="documents",
        text="a JSON document of 2 kB comes, or one of its fields changes",
        transactions=200_000,
        state=("serial",),
    ),
    Workload(
        name="blobs",
        text="single-row inserts of 1.5 kB of bytea",
        transactions=200_000,
        state=("serial",),
    ),
    Workload(
        name="hot-rows",
        text="every other transaction updates one of ten counters, the others a random row",
        transactions=_MANY,
    ),
    Workload(
        name="queue",
        text="a job comes, the oldest one is begun, it goes: a transaction each",
        transactions=300_000,
        state=("turn", "serial"),
    ),
    Workload(
        name="unique-taken",
        text="every transaction frees a value of a second unique column, or gives it to another row",
        transactions=_MANY,
        state=("turn",),
        is_bulk_possible=False,
    ),
    Workload(
        name="unique-freed",
        text="a row is deleted and comes again with the unique value of another that was deleted before",
        transactions=200_000,
        state=("turn", "freed"),
        is_bulk_possible=False,
    ),
    Workload(
        name="family",
        text="a parent and two children inserted in a transaction",
        transactions=_MANY,
        state=("serial",),
    ),
    Workload(
        name="full-index",
        text="updates of a table with replica identity FULL and an index that is not unique",
        transactions=40_000,
        script="full",
        constants={"rows": 20_000, "indexed": 1},
        is_bulk_possible=False,
    ),
    Workload(
        name="full-scan",
        text="updates of a small table with replica identity FULL and no index",
        transactions=40_000,
        script="full",
        constants={"rows": 200, "indexed": 0},
        is_bulk_possible=False,
    ),
    Workload(
        name="full-key",
        text="updates of a table with a primary key and replica identity FULL",
        transactions=200_000,
    ),
    Workload(
        name="key-change",
        text="every transaction gives a row another primary key",
        transactions=100_000,
        state=("turn",),
    ),
    Workload(
        name="trigger-always",
        text="updates of a table whose trigger computes a column, on the target as well",
        transactions=20_000,
    ),
    Workload(
        name="audit",
        text="updates of a table whose trigger notes each of them on the target",
        transactions=20_000,
        is_bulk_possible=False,
    ),
    Workload(
        name="audit-ordered",
        text="the same, where the trigger may see several transactions as one",
        transactions=20_000,
        script="audit",
        settings=('apply.tables."public.articles".parallel=ordered',),
        is_bulk_possible=False,
    ),
    Workload(
        name="partitions-leaf",
        text="an insert and an update in a hundred partitions, published as such",
        transactions=100_000,
        script="partitions",
        state=("serial",),
        is_bulk_possible=False,
    ),
    Workload(
        name="partitions-root",
        text="an insert and an update in a hundred partitions, published as one table",
        transactions=100_000,
        script="partitions",
        state=("serial",),
        publication="WITH (publish_via_partition_root = true)",
        is_bulk_possible=False,
    ),
    Workload(
        name="many-tables",
        text="an update and an insert in one of a thousand tables, a tenth of them with partitions",
        transactions=30_000,
        state=("serial",),
        is_bulk_possible=False,
    ),
    Workload(
        name="schemas",
        text="two inserts into tables of one of two hundred schemas, twenty tables each",
        transactions=32_000,
        state=("serial",),
        is_bulk_possible=False,
    ),
    Workload(
        name="bulk",
        text="an INSERT, an UPDATE of half as many rows and a DELETE of a third as many, a transaction each",
        transactions=600_000,
        psql_transactions=3,
    ),
    Workload(
        name="large",
        text="one huge transaction beside small ones",
        transactions=50_000,
        has_beside=True,
    ),
    Workload(
        name="unique-keys",
        text="accounts with two more unique indexes; one transaction in a hundred frees a value for another row",
        transactions=200_000,
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
    Workload(
        name="orders",
        text="an order with four lines; customer, stock of an item that many want, and the order before are updated",
        transactions=50_000,
        state=("serial",),
        is_bulk_possible=False,
    ),
    Workload(
        name="sysbench",
        text="the statements of sysbench's oltp_write_only on eight tables",
        transactions=100_000,
        is_bulk_possible=False,
    ),
    Workload(
        name="exclusion",
        text="single-row inserts of ranges that an exclusion constraint keeps apart",
        transactions=100_000,
        state=("serial",),
    ),
    Workload(
        name="identity-index",
        text="updates of a table whose replica identity is a unique index on a text",
        transactions=200_000,
        is_bulk_possible=False,
    ),
    Workload(
        name="mixed-sizes",
        text="single updates; one transaction in a hundred updates 3,000 rows",
        transactions=30_000,
        state=("serial",),
    ),
    Workload(
        name="gin",
        text="a small document comes, another changes; a GIN index",
        transactions=30_000,
        state=("serial",),
    ),
    Workload(
        name="savepoints",
        text="an insert, and an update in a subtransaction; one of three is rolled back",
        transactions=100_000,
        state=("serial",),
    ),
    Workload(
        name="text-keys",
        text="an insert and an update of a table whose primary key is two texts",
        transactions=100_000,
        state=("serial",),
    ),
    Workload(
        name="large-values",
        text="updates of all of a row with 8 kB out of line",
        transactions=20_000,
    ),
    Workload(
        name="cascades",
        text="a parent is deleted, and three children with it",
        transactions=30_000,
        state=("serial",),
        is_bulk_possible=False,
    ),
)

WORKLOADS: Final[Mapping[str, Workload]] = MappingProxyType({workload.name: workload for workload in _ALL})
