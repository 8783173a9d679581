"""pglogical as one of the systems: the same backlog, from a slot of its own plugin, into a fresh database.

In go a stage whose programs come with pglogical; out comes a time. It is set up as its documentation says, with its
defaults. Its slot is made together with its subscription, after the backlog, and replaced by a copy of one made before.

While it is loaded on the subscriber no database can be dropped there, because its supervisor answers no barrier. So it
is loaded for its own turns only. Tables without a primary key get the set for inserts alone.

Source: pglogical 2.4, "README"; PostgreSQL manual, "Replication Progress Tracking".
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from parapply.demo.errors import DemoError
from parapply.demo.race import Drained, measure
from parapply.demo.stage import BANK, PUBLICATION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from parapply.demo.race import Watch
    from parapply.demo.server import PgServer, StopMode
    from parapply.demo.stage import Stage

NAME: Final = "pglogical"

_BACKLOG_SLOT: Final = "backlog_pglogical"
_TIMEOUT_S = 30.0
_POLL_S = 0.01
_ADD_TABLES: Final = """
    SELECT pglogical.replication_set_add_table(
        CASE WHEN EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)
             THEN 'default' ELSE 'default_insert_only' END, c.oid)
    FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
"""


def prepare(stage: Stage, publication_options: str) -> None:
    """Have the publisher offer its tables to pglogical, too, and keep what follows for it.

    Raises:
        DemoError: pglogical is not installed for a server, or a server failed.
    """
    for server in (stage.source, stage.target):
        version(server)
    _load(stage.source, NAME)
    # Its own tables are in a schema of their own, which no subscriber has.
    stage.source.execute(
        f"DROP PUBLICATION {PUBLICATION};"
        f" CREATE PUBLICATION {PUBLICATION} FOR TABLES IN SCHEMA public {publication_options}",
        dbname=BANK,
    )
    stage.source.execute("CREATE EXTENSION pglogical", dbname=BANK)
    stage.source.execute("SELECT pglogical.create_node('publisher', %s)", [stage.source_dsn()], dbname=BANK)
    stage.source.execute(_ADD_TABLES, dbname=BANK)
    stage.source.execute(
        "SELECT pg_create_logical_replication_slot(%s, 'pglogical_output')", [_BACKLOG_SLOT], dbname=BANK
    )


def version(server: PgServer) -> str:
    """Return which pglogical is installed for a server.

    Raises:
        DemoError: none is.
    """
    found = server.execute("SELECT default_version FROM pg_available_extensions WHERE name = 'pglogical'")
    if not found:
        raise DemoError(
            f"pglogical is not installed for PostgreSQL {server.binaries.version_text} ({server.binaries.bin_dir}).",
            hint="install its package (Debian: postgresql-15-pglogical) and name the programs that it is for with"
            " --bindir-source and --bindir-target",
        )
    return str(found[0][0])


@contextmanager
def loaded(server: PgServer) -> Iterator[None]:
    """Have a server run with pglogical while the block runs; it is started again before and after."""
    _load(server, NAME)
    try:
        yield
    finally:
        # Its supervisor may miss the end that the others obey. Nothing is left to recover after a checkpoint.
        server.execute("CHECKPOINT")
        _load(server, "", mode="immediate")


def slot_of(dbname: str) -> str:
    """Return the slot that pglogical makes for a subscription named like its database."""
    return f"pgl_{dbname}_publisher_{dbname}"


def drain(stage: Stage, *, dbname: str, watch: Watch) -> Drained:
    """Drain a copy of the slot that `prepare` made, and drop it.

    Args:
        stage: prepared, with pglogical loaded on the subscriber.
        dbname: database on the subscriber, in the state the slot starts from; the subscription has its name.
        watch: watches the processes in the meantime.

    Raises:
        DemoError: it was not there in time.
    """
    slot = slot_of(dbname)

    def call(query: str, *values: str) -> list[tuple[object, ...]]:
        return stage.target.execute(query, values, dbname=dbname)

    call("CREATE EXTENSION pglogical")
    call("SELECT pglogical.create_node('subscriber', %s)", stage.target.dsn(dbname))
    call(
        "SELECT pglogical.create_subscription(%s, %s, synchronize_structure := false, synchronize_data := false)",
        dbname, stage.source_dsn(),
    )  # fmt: skip
    _wait_until("pglogical replicates", lambda: call("SELECT status FROM pglogical.show_subscription_status()") == [
        ("replicating",)
    ])  # fmt: skip
    call("SELECT pglogical.alter_subscription_disable(%s, true)", dbname)
    _wait_until("pglogical has left its slot", lambda: stage.source.execute(
        "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [slot]) == [(False,)]
    )  # fmt: skip
    stage.source.execute("SELECT pg_drop_replication_slot(%s)", [slot], dbname=BANK)
    stage.source.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [_BACKLOG_SLOT, slot], dbname=BANK)
    # Where it was: a new origin has been nowhere.
    call("SELECT pg_replication_origin_drop(%s)", slot)
    call("SELECT pg_replication_origin_create(%s)", slot)
    first_s, total_s = measure(
        stage, dbname, lambda: call("SELECT pglogical.alter_subscription_enable(%s, true)", dbname),
        lambda: watch.look(None), watch=watch,
    )  # fmt: skip
    watch.look(None, is_over=True)
    call("SELECT pglogical.drop_subscription(%s)", dbname)
    return Drained(first_s=first_s, total_s=total_s)


def _load(server: PgServer, libraries: str, *, mode: StopMode = "fast") -> None:
    server.configure({"shared_preload_libraries": libraries})
    server.restart(mode)


def _wait_until(what: str, is_so: Callable[[], bool]) -> None:
    """Return as soon as something is so.

    Raises:
        DemoError: it does not come about.
    """
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise DemoError(f"Waited {_TIMEOUT_S:g} s until {what}.")
        time.sleep(_POLL_S)
