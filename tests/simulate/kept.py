"""Schedules that failed once, each by its choices; `tests/unit/engine/test_flight_schedules.py` plays them all."""

from __future__ import annotations

from typing import Final, NamedTuple


class Kept(NamedTuple):
    """One schedule."""

    kind: str
    source: str  # choices of the stream, as numbers
    schedule: str  # all other choices

    @property
    def parts(self) -> list[list[int]]:
        """Return the choices, as `Case.parts`."""
        return [[int(number) for number in text.split()] for text in (self.source, self.schedule)]

    @classmethod
    def of(cls, kind: str, parts: list[list[int]]) -> Kept:
        """Return the form in which choices are kept."""
        return cls(kind, *[" ".join(map(str, part)) for part in parts])


KEPT: Final = [
    # Relaxed, a head that had failed was tried again at each commit of another batch, before its pause was over.
    Kept("core", "0 0 0 0 0 0 12" + 48 * " 0" + " 9 0 0 0 8", "1 0 0 0 1 1 1 2 0 0 0 0 0 0 0 0 0 0 0 1 0 0 0 0 0 0 1"),
    # The stall check rolled a prepared transaction back while its own ROLLBACK PREPARED was on the way.
    Kept(
        "core",
        "1 0 0 0 1 0 0 28 0 0 0 0 9 0 0 0 9 0 0 0 9 0 0 0 9 0 0 0 0 0 0 0 0 0 0 0 9 0 0 0 0 0 0 0 0 0 0 0 9 0 "
        "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 9 0 0 0 9 0 0 0 0 0 0 0 9 0 0 0 9 0 0 0 0 0 0 0 10 0 0 0 0 0 0 0 "
        "14 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 3 1 1 1 2 3 1 0 1 1 1 0 0 0 0 0 0 0 0 0 0 0 "
        "0 0 0 1 2 0 0 0 0 1 1 0 0 1 3 0 0 1 0 0 0 0 1 1 0 0 0 0 0 0 1 2 3 1 0 0 0 0 0 1 3 1 1",
        "1 2 2 0 1 3 0 1 1 3 0 0 0 1 0 7 20 1 0 4 0 1 1 0 0 0 1 1 1 1 4 0 0 0 0 1 0 3 0 0 1 0 0 0 1 1 0 0 1 0 "
        "6 0 0 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 0 0 1 0 2 1 0 4 0 0 0 0 0 0 0 1 1 0 0 3 2 0 1 1 1 1 "
        "3 0 2 2 2 0 0 0 0 0 0 0 0 0 1 1 0 1 2 1 0 1 0 0 1 0 0 1 2 1 0 0 0 0 1 1 0 1 1 0 1 1 1 0 1 1 1 2 1 0 "
        "1 2 2 2 0 0 0 0 0 0 1 1 0 1 0 0 1 1 1 0 5 0 0 1 0 6 0 0 0 0 0 1 0 1 0 1 0 1 1 0 1 1 0 1 0 1 1 0 0 0 "
        "1 1 2 0 0 2 2 2 1 2 0 0 0 0 1 1 0 0 0 0 1 0 1 0 0 1 0 0 0 1 1 0 1 0 0 1 0 0 0 1 0 6 0 0 0 1 1 0 0 0 "
        "1 0 0 0 0 0 1 0 0 0 1 1 1 2 0 0 0 2 0 0 0 0 0 1 0 0 0 0 1 0 4 0 0 2 1 1 0 0 0 0 1 0 1 0 5 0 1 0 1 0 "
        "0 1 0 3 1 0 6 3 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 7 0 1 1 1 1 3 2 0 1 0 1 0 3 0 0 2 0 1 1 0 0 3 2 1 "
        "0 3 0 0 1 1 0 1 1 1 0 0 0 0 1 0 6 1 1 0 3 0 2 1 1 0 2 1 1 2 0 0 3 0 1 1 1 0 0 1 1 0 0 0 1 1 0 1 1 0 "
        "0 0 0 0 0 0 0 1 0 5 1 0 1 0 1 0 0 0 0 0 0 0 1 0 0 1 0 0 1 0 3 0 0 1 1 1 1 4 3 0 1 0 0 1 1 0 0 1 1 1 "
        "1 1 2 0 2 0 0 1 0 1 0 4 1 0 0 1 0 0 0 0 1 0 3 0 0 0 0 1 0 0 1 0 1 0 1 1 1 1 0 3 1 0 0 0 0 0 0 0 0 1 "
        "0 1 1 0 4 0 0 0 0 0 0 1 0 0 0 0 0 1 2 1 1 0 6 1 0 1 0 0 0 0 0 0 1 0 0 0 0 1 0 7 10 0 2 0 1 0 7 17 0 "
        "3 0 0 1 0 0 0 0 1 0 0 0 0 0 0 0 1 0 5 0 0 0 0 0 1 1 0 0 0 0 0 0 0 0 1 0 3 0 0 0 0 1 0 0 0 1 1 0 4 1 "
        "0 3 0 0 0 0 0 0 0 1 1 1 1 0 0 0 2 1 0 2 0 0 1 0 0 0 0 0 0 0 0 1 0 1 1 0 1 1 0 0 1 0 0 0 1 0 0 1 1 0 "
        "0 0 1 0 7 6 0 0 0 0 0 1 0 1 1 0 4 0 0 0 0 0 1 0 1 1 4 3 1 1 1 1 0 1 1 0 0 1 0 1 0 0 1 0 0 0 0 0 0 0 "
        "0 0 0 0 0 0 0 0 0 0 1 0 0 1 0 2 1 0 0 0 1 0 0 0 0 0 0 0 1 1 1 1 1 3 2 2 1 3 0 0 1 1 1 0 1 0 0 1 0 0 "
        "0 1 0 0 0 0 0 1 1 1 1 0 2 1 2 0 1 1 1 4 3 0 0 0 0 0 1 0 0 0 1 2 2 1 3 1 0 2 1 1 4 3 0 1 1 1 0 0 1 0 "
        "0 3 2 2 0 3 0 0 0 0 1 0 7 11 0 0 0 1 0 0 0 1 0 3 1 1 2 0 1 0 1 1 0 2 0 0 1 1 0 1 1 0 1 1 0 1 0 0 2 1 "
        "1 0 5 0 0 0 0 1 0 0 0 1 1 0 0 0 0 0 1 0 0 0 0 0 1 0 0 0 0 0 0 0 0 1 0 0 1 2 1 0 0 0 0 0 0 0 1 0 6 1 "
        "0 0 1 0 6 2 0 0 0 0 0 1 0 0 1 0 1 0 1 0 0 0 0 0 0 1 0 2 0 0 1 0 0 0 0 0 0 0 1 0 0 0 0 1 0 1 0 5 0 0 "
        "1 1 4 3 1 2 0 1 0 0 0 0 2 2 0 2 0 0 1 0 1 0 5 0 1 0 0 1 0 0 0 0 2 2 1 0 1 1 0 0 1 1 1 0 5 0 1 0 1 0 "
        "2 1 0 1 1 0 1 0 1 0 0 0",
    ),
]
