"""A migration from its first command to the way back, in short. The whole of it: `python -m tests.migration`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from tests.fixtures.plain import FAST
from tests.migration import tables
from tests.migration.run import Migration

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fixtures.servers import NewDatabase, ServerOf

pytestmark = [pytest.mark.crash, pytest.mark.timeout(180), pytest.mark.needs_majors(15, 18)]


@pytest.fixture
def owner(server_of: ServerOf) -> Iterator[str]:
    """The name of a role that owns all and writes; the target gets it with the migration."""
    name = f'Owner of "all" {os.getpid()}'
    who = sql.Identifier(name)
    source = server_of("source", 15)
    source.execute(sql.SQL("CREATE ROLE {} LOGIN").format(who))
    yield name
    for server in (source, server_of("target", 18)):
        server.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(who))


def test_no_acknowledged_write_is_lost_there_and_back(
    owner: str, server_of: ServerOf, new_database: NewDatabase, tmp_path: Path
) -> None:
    """While clients write and the schema changes, `migrate` is killed and run again; then each cut-over, and back.

    After each of them both sides are equal, by `parapply verify` and by separate queries, schema included, and each
    acknowledged transaction is present once, whole. `migrate` that waits ends well with the cut-over.
    """
    source, target = new_database(server_of("source", 15), "source"), new_database(server_of("target", 18), "target")
    tables.make(source, owner, size_mb=0)
    with Migration(
        source, target, owner, tmp_path, seed="3", kills=1, pace_s=0.3, per_s=8, writes=5, settings=FAST
    ) as run:
        account = run.run()
    assert account.total == 0, [stage.texts for stage in account.stages]
    assert account.changes == len(tables.CHANGES)
