"""How far a step is, for those who read it elsewhere."""

from __future__ import annotations

from parapply.copy.bar import CopyProgress
from parapply.migrate.show import Screen
from parapply.target.state.migrations import HowFar
from parapply.vocabulary import MigrationStep


def test_a_copy_that_goes_on_counts_the_rows_before_and_the_bytes_of_its_own() -> None:
    """The bytes are divided by the time of the step, which begins again; none of the figures jumps at the end."""
    screen = Screen(as_json=False)
    now = CopyProgress(rows=100, size_bytes=1000, share=0.5, bytes_per_s=10.0, left_s=2.0)
    screen.copying(MigrationStep.COPY, 700)(now)
    assert screen.how_far() == HowFar(done=800, total=900, unit="rows", size_bytes=1000, left_s=2.0)
    screen.has_copied(905)
    assert screen.how_far() == HowFar(done=905, total=905, unit="rows", size_bytes=1000)
