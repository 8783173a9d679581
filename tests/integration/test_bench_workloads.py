"""The benchmark's loads on a real publisher: they fail nowhere, and hold what the benchmark says they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.workloads import WORKLOADS
from parapply.demo.interrupts import Interrupts
from parapply.demo.race import create_slot
from parapply.demo.stage import BANK, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS, EACH = 2, 1500

# How many committed transactions the slot holds: the first byte of a Commit message is C.
COMMITS = """SELECT count(*) FROM pg_logical_slot_peek_binary_changes(
    'check', NULL, NULL, 'proto_version', '1', 'publication_names', 'bank') WHERE get_byte(data, 0) = ascii('C')"""

#: What must be there after a load, each a query that is true.
PROOFS = {
    "unique-keys": {
        "an account left and another has its address": "SELECT count(*) > 0 FROM accounts"
        " WHERE id > 100000 AND email ~ '^user[0-9]+@' AND email <> 'user' || id || '@example.org'",
        "addresses were changed": "SELECT count(*) > 0 FROM accounts WHERE email ~ '^user[0-9]+[.][0-9]+@'",
        "money is neither made nor lost": "SELECT sum(balance) = 0 FROM accounts",
    },
    "foreign-keys": {
        "customers came": "SELECT count(*) > 0 FROM customers WHERE id > 50000",
        "new customers placed orders": "SELECT count(*) > 0 FROM orders WHERE customer_id > 50000",
        "new orders have lines": "SELECT count(*) > 0 FROM order_lines WHERE order_id > 10000",
        "old orders went": "SELECT count(*) < 10000 FROM orders WHERE id <= 10000",
        "customers went": "SELECT n_tup_del > 0 FROM pg_stat_user_tables WHERE relname = 'customers'",
    },
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Two servers of version 18, as the benchmark has them."""
    with Stage(Interrupts(), name="bench-test", settings={"fsync": "off"}) as stage:
        yield stage


@pytest.mark.parametrize("name", PROOFS)
def test_a_load_is_what_it_says(stage: Stage, name: str) -> None:
    """Every run of the script is one transaction that changes rows, and each kind of change it promises is there."""
    workload = WORKLOADS[name]
    try:
        workload.fill(stage, 1)
        create_slot(stage, "check")
        assert workload.load(stage, scale=1, clients=CLIENTS, each=EACH) == CLIENTS * EACH
        ((commits,),) = stage.source.execute(COMMITS, dbname=BANK)
        # The two marks beside the load.
        assert commits == CLIENTS * EACH + 2
        for what, query in PROOFS[name].items():
            assert stage.source.execute(query, dbname=BANK) == [(True,)], what
    finally:
        stage.source.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots", dbname=BANK)
        for server in (stage.source, stage.target):
            server.execute(f"DROP DATABASE {BANK} WITH (FORCE)")
