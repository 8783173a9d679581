"""Progress of a migration that others see while it runs: noted on the target each second, and served as metrics.

In: the screen, which knows how far the step is. Out: rows of `parapply.migrations`, over a separate session, because
the step's own may be inside a transaction; and the endpoint of `metrics.listen`, as long as no daemon of ours needs it.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Self

import click

from parapply.connect import open_target
from parapply.errors import ConfigError, ParapplyError
from parapply.http_server import TEXT, HttpServer
from parapply.logs import redact_text
from parapply.metrics.exposition import CONTENT_TYPE, SlotFigures, exposition
from parapply.metrics.figures import migration_values
from parapply.target.session.settings import target_errors
from parapply.target.state import migrations
from parapply.target.state.moves import records
from parapply.target.state.schema import has_schema, in_schema
from parapply.tasks import end_tasks
from parapply.vocabulary import MigrationStep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from parapply.config import Config
    from parapply.migrate.show import Screen
    from parapply.target.session.settings import Connection
    from parapply.target.state.migrations import Migration

#: Seconds between two notes.
_NOTE_S: Final = 1.0


class Noter:
    """As a context manager it runs its own task."""

    def __init__(self, config: Config, migration: Migration, screen: Screen) -> None:
        self._config = config
        self._migration = migration
        self._screen = screen
        self._step: MigrationStep | None = None
        #: Progress that was noted last.
        self._noted: migrations.HowFar | None = None
        self._steps: list[dict[str, Any]] = []
        self._conn: Connection | None = None
        self._has_failed = False
        self._turn = asyncio.Lock()
        self._server = HttpServer(self._answer)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        task = asyncio.create_task(self._run(), name="migrate-notes")
        self._stack.push_async_callback(self._close)
        self._stack.push_async_callback(end_tasks, [task])
        await self._serve()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _close(self) -> None:
        await self._server.close()
        if self._conn is not None:
            await self._conn.close()

    def begin(self, step: MigrationStep) -> None:
        """Note from now on how far this step is."""
        self._step, self._noted = step, None
        self._screen.forget()

    async def end(self) -> None:
        """Note for the last time how far the step is; its end is noted by another."""
        await self._look()
        self._step = None

    async def leave(self) -> None:
        """Leave the address of the endpoint to a daemon for good."""
        await self._server.close()

    @asynccontextmanager
    async def left_to_daemon(self) -> AsyncIterator[None]:
        """Leave the address of the endpoint to a daemon that this command starts, until the block ends."""
        await self._server.close()
        try:
            yield
        finally:
            await self._serve()

    async def _serve(self) -> None:
        address = self._config.metrics.listen
        if address is None:
            return
        try:
            host, port = await self._server.open(address)
        except ConfigError as error:
            # A daemon that runs already has the address, and also shows the migration.
            click.echo(f"metrics: this command serves none: {error.line()}", err=True)
            return
        click.echo(f"metrics: http://{host}:{port}/metrics", err=True)

    async def _run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_NOTE_S)

    async def _look(self) -> None:
        async with self._turn:
            try:
                await self._note()
            except ParapplyError as error:
                # No reason to end the step, which has its own sessions; but others see no progress.
                if not self._has_failed:
                    self._has_failed = True
                    text = f"migrate: how far it is cannot be noted, which is tried again: {error.line()}"
                    click.echo(redact_text(text), err=True)
                self._steps = []
                conn, self._conn = self._conn, None
                if conn is not None:
                    with suppress(ParapplyError):
                        await conn.close()

    async def _note(self) -> None:
        schema, of = self._migration.schema, self._migration.system_identifier
        if self._conn is None:
            self._conn = await open_target(self._config, "migrate")
        if not await has_schema(self._conn, schema):
            return
        how_far, step = self._screen.how_far(), self._step
        if step is not None and how_far is not None and how_far != self._noted:
            await migrations.note(self._conn, self._migration, step, how_far)
            self._noted = how_far
        if self._config.metrics.listen is not None:
            query = in_schema(migrations.SHOWN, schema)
            with target_errors("reading how far the migration is"):
                self._steps = await records(self._conn, query, [self._migration.slot_name, None, of])

    def _answer(self, path: str) -> tuple[int, str, bytes]:
        if path != "/metrics":
            return 404, TEXT, b"/metrics\n"
        values = migration_values(self._steps or ([_CHECKING] if self._step is MigrationStep.CHECK else []))
        return 200, CONTENT_TYPE, exposition([SlotFigures(self._migration.slot_name, values, ())])


#: The first step makes nothing, so nothing on the target shows it.
_CHECKING: Final[dict[str, Any]] = {
    "step": MigrationStep.CHECK, "state": "running", "seconds": 0.0, "done": 0, "total": 0, "unit": "",
    "size_bytes": 0, "left_s": None,
}  # fmt: skip
