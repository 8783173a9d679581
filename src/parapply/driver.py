"""psycopg's connection, made safe to give up while it is being opened."""

from __future__ import annotations

import asyncio
import traceback
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from typing import Self


class Session(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A connection to either end; rows are tuples."""

    @classmethod
    async def connect(cls, conninfo: str = "", **options: Any) -> Self:  # noqa: ANN401  psycopg's
        """Open a connection; arguments and errors are psycopg's.

        One that is cancelled while the server answers is closed: psycopg keeps it in a local variable, which lives as
        long as the exception does, and the server would keep its process as long.
        """
        try:
            return await super().connect(conninfo, **options)
        except asyncio.CancelledError as cancelled:
            traceback.clear_frames(cancelled.__traceback__)
            raise
