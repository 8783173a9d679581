"""The heal that `parapply run` gives to the daemon, whose rooms import no command."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parapply.config import Config


async def heal_lost(config: Config) -> tuple[int, int] | None:
    """Do as `heal.automatic.heal_lost`, whose modules few daemons ever need."""
    from parapply.heal import automatic  # noqa: PLC0415

    return await automatic.heal_lost(config)
