"""The parts of one slot that the endpoint shows. Kept by each leader, also where no endpoint is opened."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parapply.metrics.figures import Figures
    from parapply.runtime.observe.gauges import Gauges
    from parapply.runtime.observe.health import Health
    from parapply.runtime.observe.page import StatusPage


class SlotView:
    """All that is shown of one slot."""

    def __init__(self, slot: str, figures: Figures, gauges: Gauges, health: Health) -> None:
        self.slot = slot
        self.figures = figures
        self.gauges = gauges
        self.health = health

    @cached_property
    def page(self) -> StatusPage:
        """Return the slot's page; what makes it is imported when the first browser asks, not at the daemon's start."""
        from parapply.runtime.observe.page import StatusPage  # noqa: PLC0415

        return StatusPage(self.slot, self.figures, self.gauges, self.health)
