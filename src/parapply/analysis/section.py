"""One section of the page for a slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parapply.analysis.plots import Plot


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page."""

    title: str
    lead: str
    plots: list[Plot] = field(default_factory=list)
    #: Shown below the plots: heading of each column, and rows of texts.
    header: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
