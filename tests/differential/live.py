"""Changes of the tables on the targets, made while they apply: DDL that leaves the same rows whenever it is done.

In go databases and tables; out come the same statements in the same order on each of the databases.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from parapply.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.differential.tables import RandomTable
    from tests.fixtures.databases import Database

# How often one more statement comes, asked before each transaction.
_SHARE = 0.06
_LOCK_NOT_AVAILABLE = "55P03"


class LiveChanges:
    """Statements that each target has still to run; a statement that waits for a lock in vain is tried again later."""

    def __init__(
        self, databases: Sequence[Database], oracle: Database, tables: Sequence[RandomTable], *, seed: int
    ) -> None:
        """Do nothing yet.

        Args:
            databases: of the daemons' targets.
            oracle: target of the built-in subscription, which does all in the end: with a column that was added while
                it ran, it has written another column's value there.
            tables: some of which may have statements.
            seed: of their moments.
        """
        self._chooser = random.Random(f"live {seed}")
        self._changing = [table for table in tables if table.target_live]
        self._next = dict.fromkeys((table.name for table in self._changing), 0)
        self._left: dict[str, list[str]] = {database.dbname: [] for database in (*databases, oracle)}
        self._databases = list(databases)

    def go_on(self) -> None:
        """Perhaps have one more statement to run, and run what can be run now."""
        if not self._changing:
            return
        if self._chooser.random() < _SHARE:
            table = self._chooser.choice(self._changing)
            statement = table.target_live[self._next[table.name] % len(table.target_live)]
            self._next[table.name] += 1
            for left in self._left.values():
                left.append(statement)
        # One of them at a time: most have to wait in vain.
        self._databases.append(self._databases.pop(0))
        self._run(self._databases[0], "20ms")

    def finish(self, database: Database) -> None:
        """Run the rest, on a target that has applied everything."""
        self._run(database, "60s")

    def _run(self, database: Database, lock_timeout: str) -> None:
        left = self._left[database.dbname]
        while left:
            try:
                database.execute(f"SET LOCAL lock_timeout = '{lock_timeout}'; {left[0]}")
            except DemoError as error:
                if error.sqlstate != _LOCK_NOT_AVAILABLE:
                    raise
                return
            del left[0]
