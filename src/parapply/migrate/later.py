"""Objects made after the rows: indexes, constraints, triggers, foreign keys; several connections, each statement once.

In: the cut-up script of pg_dump. Out: every item committed together with its note, so that an interrupted step goes on
with what is left. `pg_restore --jobs` would do the same once and from the start, and its first statement of each
connection is one that an older target refuses.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

import psycopg

from parapply import failpoints
from parapply.connect import open_target
from parapply.copy import schema as schemas
from parapply.errors import TargetRefused
from parapply.migrate.script import Script, parse, runs
from parapply.target.session.settings import target_errors
from parapply.target.state import migrations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import Config
    from parapply.copy.places import Access
    from parapply.migrate.script import Item
    from parapply.migrate.show import Counter
    from parapply.target.session.settings import Connection
    from parapply.target.state.migrations import Migration

_DEADLOCK: Final = "40P01"


def read(text: bytes) -> Script:
    """Cut a script up; raise ConfigError if pg_dump has written what is not known here."""
    try:
        return parse(text.decode())
    except ValueError as error:
        raise schemas.unknown(error) from error


class Later:
    """Runs items."""

    def __init__(self, config: Config, migration: Migration, script: Script, counter: Counter, access: Access) -> None:
        self._config = config
        self._migration = migration
        self._script = script
        self._counter = counter
        self._access = access

    async def run(self, items: Sequence[Item]) -> None:
        """Run what is not done yet; what was done before an error stays."""
        for together in runs(items):
            left = deque(together)
            again: list[Item] = []
            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(1, min(self._access.connections, len(together)) + 1):
                        group.create_task(self._lane(left, again), name=f"later-{number}")
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from errors
            if again:
                # One after the other they conflict with none.
                await self._lane(deque(again), None)

    async def _lane(self, left: deque[Item], again: list[Item] | None) -> None:
        async with self._access.lane(), await open_target(self._config, "migrate") as conn:
            head = schemas.fitting(self._script.head, await schemas.known_settings(conn))
            with target_errors("setting up the session"):
                await conn.execute(head.encode())
                await conn.execute(b"SET search_path = pg_catalog, pg_temp")
            while left:
                item = left.popleft()
                self._counter.begin(item.title)
                try:
                    await self._make(conn, item)
                except TargetRefused as error:
                    cause = error.__cause__
                    if again is None or not isinstance(cause, psycopg.Error) or cause.sqlstate != _DEADLOCK:
                        raise
                    again.append(item)
                    continue
                failpoints.probe(failpoints.MIGRATE_ITEM)
                self._counter.add(item.title)

    async def _make(self, conn: Connection, item: Item) -> None:
        try:
            # In one transaction: what is noted is made, and what is made is noted.
            with target_errors(f"making {item.title}"):
                async with conn.transaction():
                    await conn.execute(item.text.encode())
                    await migrations.add_item(conn, self._migration, item.digest)
        except TargetRefused as error:
            cause = error.__cause__
            if isinstance(cause, psycopg.Error) and cause.sqlstate == _DEADLOCK:
                raise
            shown = schemas.refused(error, item.text, is_migration=True)
            hint = error.hint or (
                "mend it, on either end, and run the same command: it goes on with what is not made yet"
            )
            raise TargetRefused(str(shown), hint=hint) from cause
