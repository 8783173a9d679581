"""The sessions with which every epoch begins: a process opens them before it has loaded the rest of its modules.

They change nothing. All that makes them safe to use comes after them (``runtime/sessions.py``).
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, TypeAlias

from parapply.source import slot
from parapply.target.session import settings
from parapply.tasks import end_tasks, load_modules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.config import Config
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.runtime.tables.prefetch import CataloguePrefetch

Look: TypeAlias = "tuple[slot.Connection, slot.SourceFacts]"

#: Modules for questions about the target.
_MODULES: Final = ("runtime.tables.control_pool", "plan.table", "target.catalogue.query", "runtime.tables.prefetch")


class FirstSessions:
    """Opened by tasks from the beginning on, whose errors are raised where a session is needed.

    Attributes:
        config: both ends.
        looking: the plain session on the publisher, and its first answer.
        leading: the session for the lease.
        asking: the sessions for questions, and the facts of published tables, which are read from then on.
    """

    def __init__(self, config: Config) -> None:
        """Begin to open them."""
        self.config = config
        self._stack = AsyncExitStack()
        self._answers: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.looking = asyncio.create_task(self._look(), name="open-source")
        self.leading = asyncio.create_task(self._lead(), name="open-leader")
        self.asking = asyncio.create_task(self._ask(), name="open-questions")
        self._naming = asyncio.create_task(self._published_tables(), name="published-tables")

    async def close(self) -> None:
        """Close what is open, and give up what is not; once more is harmless."""
        await end_tasks([self._naming, self.asking, self.leading, self.looking])
        await self._stack.aclose()

    async def _look(self) -> Look:
        source = self.config.source
        conn = await slot.connect(source.login, application_name=f"parapply {source.slot}")
        await self._stack.enter_async_context(conn)
        return conn, await slot.inspect(conn, source.slot)

    async def _lead(self) -> settings.Connection:
        target = self.config.target
        try:
            conn = await settings.connect_control(
                target.login,
                role=target.session_replication_role,
                application_name=f"parapply leader {self.config.source.slot}",
                on_open=lambda: self._answered(answers=True),
            )
            return await self._stack.enter_async_context(conn)
        finally:
            self._answered(answers=False)

    def _answered(self, *, answers: bool) -> None:
        if not self._answers.done():
            self._answers.set_result(answers)

    async def _ask(self) -> tuple[ControlPool, CataloguePrefetch]:
        # A pool that waits for a silent network takes seconds to close: no signal shall wait for that (F38).
        if not await self._answers:
            await asyncio.shield(self.leading)
        await load_modules(_MODULES)
        from parapply.runtime.tables.control_pool import ControlPool  # noqa: PLC0415  loaded by then
        from parapply.runtime.tables.prefetch import CataloguePrefetch  # noqa: PLC0415  as said

        target = self.config.target
        role = target.session_replication_role
        control_pool = ControlPool(target.login, role, f"parapply control pool {self.config.source.slot}")
        await self._stack.enter_async_context(control_pool)
        # Shielded, because giving up the prefetch must not cancel the query itself.
        ahead = CataloguePrefetch(control_pool, role, lambda: asyncio.shield(self._naming))
        self._stack.push_async_callback(ahead.close)
        return control_pool, ahead

    async def _published_tables(self) -> Sequence[tuple[str, str]]:
        source, _ = await asyncio.shield(self.looking)
        names = await slot.tables_to_expect(source, self.config.source.publications)
        return [self.config.mapping.target_of(name) for name in names]
