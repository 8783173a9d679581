"""The places at which cut-overs of several databases wait for each other, so that all take over or none does.

Up to the last place a failure of one takes all back. Behind it a failure stops only the one, whose command goes on:
clients of the others may have written to the target.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from parapply.errors import ParapplyError
from parapply.vocabulary import CutoverStep

if TYPE_CHECKING:
    from collections.abc import Collection

#: Steps before which all wait for each other; before the last one it is decided.
PLACES = (CutoverStep.PREPARING, CutoverStep.FENCING, CutoverStep.STOPPING, CutoverStep.OPENING)


class Meeting:
    """The cut-overs of one command; a single one waits for none."""

    def __init__(self, names: Collection[str] = ("",)) -> None:
        self._n_expected = len(names)
        #: More than one database is cut over.
        self.is_shared = len(names) > 1
        #: Held by the one that resumes poolers, because a setting of the whole pooler is changed for that moment.
        self.at_poolers = asyncio.Lock()
        self._reached: Counter[CutoverStep] = Counter()
        self._complete: defaultdict[CutoverStep, asyncio.Event] = defaultdict(asyncio.Event)
        self._failed = ""
        self._open = ""

    @property
    def open_database(self) -> str:
        """Return the name of one of several databases whose target takes over, so that none is taken back; or empty."""
        return self._open if self.is_shared else ""

    def has_opened(self, name: str) -> None:
        """Note a database of which the target takes over, or did in a command before."""
        self._open = name

    def fail(self, name: str) -> None:
        """Note a failure: all that wait, and do not stand behind the last place, fail with it."""
        self._failed = self._failed or name
        for step in PLACES:
            self._complete[step].set()

    def leave(self) -> None:
        """Expect one less, which has passed the last place in a command before."""
        self._n_expected -= 1
        for step in PLACES:
            self._look(step)

    async def reach(self, step: CutoverStep, name: str) -> None:
        """Wait until all have come to a step; raise ParapplyError if another one has failed before."""
        self._reached[step] += 1
        self._look(step)
        await self._complete[step].wait()
        if self._reached[step] < self._n_expected:
            raise ParapplyError(
                f"this database is not cut over, because {self._failed!r} is not",
                hint="see there; the same command does all of them again",
            )
        if step is PLACES[-1]:
            self.has_opened(name)

    def _look(self, step: CutoverStep) -> None:
        if self._reached[step] >= self._n_expected:
            self._complete[step].set()
