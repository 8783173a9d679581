"""Sessions on the target for questions outside the apply path: the catalogue, locks, displays.

A small pool, because such a question must wait neither for the control session's commit to disk nor for a worker.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from parapply.driver import Session
from parapply.errors import TargetLost
from parapply.target.session import settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Self

    from parapply.login import Login

#: Sessions at most: the catalogue and the stall check may ask at the same time.
_SESSIONS = 2
#: Seconds to wait for a session; a target that gives none in this time counts as lost.
_TIMEOUT_S = 15.0
#: Milliseconds that a transaction here may stand still. The fence and `--takeover` know the sessions that apply and the
#: leader's, not these: where a machine is paused while one of these has written what people see, its rows stay locked,
#: and the next daemon could not begin (F20).
_IDLE_TRANSACTION_MS = 10_000
#: Seconds that a question waits for the first session before another is opened. Most take a few milliseconds, and to
#: open a session takes both ends ten and more.
_GROWS_AFTER_S = 0.2


class ControlPool:
    """Opened and closed by the daemon, once for each epoch."""

    def __init__(self, login: Login, role: str, application_name: str) -> None:
        """Open nothing yet."""
        self._role = role
        #: Held while a question uses the only session; see `_GROWS_AFTER_S`.
        self._turn = asyncio.Lock()
        self._pool: AsyncConnectionPool[settings.Connection] = AsyncConnectionPool(
            settings.client_conninfo(login.dsn, application_name),
            kwargs={"autocommit": True, "command": login.command},
            connection_class=Session,
            configure=self._pin,
            min_size=1,
            max_size=_SESSIONS,
            timeout=_TIMEOUT_S,
            open=False,
            name=application_name,
        )

    async def __aenter__(self) -> Self:
        """Open the first session; raise TargetLost if it cannot be opened."""
        try:
            await self._pool.open(wait=True, timeout=_TIMEOUT_S)
        except PoolTimeout as error:
            await self._pool.close()
            raise TargetLost("target: no session for catalogue questions could be opened") from error
        except BaseException:
            # Usually runs after a cancellation. Tasks of the pool that nothing stops would keep the process from
            # ending.
            await self._pool.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all sessions."""
        await self._pool.close()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[settings.Connection]:
        """Give one session, in autocommit mode; raise TargetLost if none is free or can be opened in time."""
        try:
            async with AsyncExitStack() as stack:
                if not (self._turn.locked() and self._pool.get_stats()["pool_available"]):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_GROWS_AFTER_S):
                            await stack.enter_async_context(self._turn)
                yield await stack.enter_async_context(self._pool.connection())
        except (PoolTimeout, PoolClosed) as error:
            raise TargetLost("target: no session for catalogue questions") from error

    async def _pin(self, conn: settings.Connection) -> None:
        await settings.pin_session(conn, kind="control", role=self._role, synchronous_commit="on")
        with settings.target_errors("pinning session settings"):
            await conn.execute(
                "SET plan_cache_mode = force_generic_plan;"
                f" SET idle_in_transaction_session_timeout = {_IDLE_TRANSACTION_MS:d}".encode()
            )
