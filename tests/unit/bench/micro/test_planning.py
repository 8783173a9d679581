"""The streams that the planner is measured with are what their names say."""

from __future__ import annotations

import pytest

from bench.micro.planning import measure
from bench.micro.streams import NAMES, stream


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 7, 50])
def test_streams_are_planned_whole(name: str, size: int) -> None:
    """Every transaction of a stream gets into a batch, and the frames are the same every time."""
    source = stream(name, 100)
    assert stream(name, 100).frames == source.frames
    measured = measure(source, name, size)
    assert (measured.transactions, measured.batches) == (100, 100 // size)


def test_streams_differ_in_their_plans_only() -> None:
    """The cost of an index or a foreign key is visible because nothing else differs."""
    streams = {name: stream(name, 20) for name in NAMES}
    assert streams["no further index"].frames == streams["2 unique indexes"].frames
    assert streams["no foreign key"].frames == streams["2 foreign keys"].frames
