"""The limiting factor over the last minutes of the daemon."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from parapply import limits
from parapply.runtime.observe.limiting import Limiting, Look

if TYPE_CHECKING:
    from collections.abc import Mapping

_MUCH = limits.BEHIND_BYTES + 1


def _look(
    state: str, backends: Mapping[str, int] | None = None, *, behind_bytes: int = 0, cpu_s: float = 0.1,
    throttled_s: float = 0.0,
) -> Look:  # fmt: skip
    waits = (("key", "public.a", "a_pkey"),) if state == "dependency" else ()
    return Look(state, 1.0, cpu_s, 0.5, 0.0, behind_bytes, tuple((backends or {}).items()), waits, (), throttled_s)


@pytest.mark.parametrize(
    ("look", "limit", "detail", "words"),
    [
        (_look("nothing"), "source", "", "nothing more that was due"),
        (_look("worker free", behind_bytes=_MUCH), "publisher", "", "did not come faster"),
        (_look("worker free", behind_bytes=_MUCH, cpu_s=0.9), "leader", "", "that was full"),
        (_look("nothing", throttled_s=1.0), "throttle", "", "apply.max_changes_per_s held changes back, 100 %"),
        (
            _look("worker free", behind_bytes=_MUCH, throttled_s=0.75),
            "throttle",
            "",
            "apply.max_changes_per_s held changes back, 75 %",
        ),
        # The work that keeps all workers busy would take its time also without it.
        (_look("executing", {"CPU": 2}, throttled_s=1.0), "target", "CPU", "on its processors"),
        (_look("dependency"), "dependency", "", "Dependencies on key a_pkey in public.a"),
        (_look("commit", {"client": 2}), "commit", "order", "in source order"),
        (_look("commit", {"IO:WALSync": 2}), "commit", "flush", "flushing"),
        (_look("executing", {"CPU": 2, "client": 1}), "target", "CPU", "on its processors"),
        (_look("executing", {"Lock:transactionid": 2}), "target", "locks", "locks of other sessions"),
        # One batch stands at a lock, whatever the other workers wait for.
        (_look("worker free", {"Lock:transactionid": 1}), "target", "locks", "locks of other sessions, 100 %"),
        (_look("dependency", {"Lock:relation": 1}), "target", "locks", "locks of other sessions"),
        (_look("commit", {"Lock:tuple": 1}), "target", "locks", "locks of other sessions"),
        (_look("worker free", {"Lock:extend": 1}), "source", "", "nothing more that was due"),
    ],
)
def test_the_last_minutes_are_judged_by_the_report_s_rule(look: Look, limit: str, detail: str, words: str) -> None:
    """Two minutes of one thing are that limit, however different the time before was."""
    limiting = Limiting()
    for _ in range(200):
        limiting.add(_look("late rows"))
    for _ in range(120):
        limiting.add(look)
    said = json.loads(limiting.take() or "")
    assert (said["limit"], said["detail"], said["window_s"]) == (limit, detail, 120)
    assert words in said["words"]
    assert said["advice"]
    assert said["evidence"][0].startswith("Of the last 120 s: ")


def test_nothing_to_do_is_no_answer_where_two_fifths_are_something_else() -> None:
    """The source is named only while nothing else takes a good part of the time."""
    for n_locked, limit in ((39, "source"), (41, "target")):
        limiting = Limiting()
        for second in range(100):
            limiting.add(_look("executing", {"Lock:tuple": 1}) if second < n_locked else _look("nothing"))
        assert json.loads(limiting.take() or "")["limit"] == limit


def test_a_verdict_is_given_every_few_seconds() -> None:
    """Not after the first second, of which nothing can be said, and not again before there is more to look at."""
    limiting = Limiting()
    given = []
    for _ in range(12):
        limiting.add(_look("nothing"))
        given.append(limiting.take() is not None)
    assert given == [n in (4, 9) for n in range(12)]


def test_nothing_to_do_is_said_once() -> None:
    """A minute of it, and then only the end of it."""
    limiting = Limiting()
    given = []
    for second in range(80):
        limiting.add(_look("nothing") if second < 75 else _look("dependency"))
        given.append(limiting.take() is not None)
    assert [second for second, is_given in enumerate(given) if is_given] == [*range(4, 60, 5), 79]


@pytest.mark.parametrize(
    ("counts", "state"),
    [
        ((4, 0, 0, 0, 0, 0), "nothing"), ((4, 1, 0, 1, 1, 0), "worker free"), ((4, 1, 1, 3, 3, 0), "dependency"),
        ((4, 9, 9, 4, 2, 0), "executing"), ((4, 0, 0, 4, 1, 1), "late rows"), ((4, 0, 0, 4, 1, 0), "commit"),
    ],
)  # fmt: skip
def test_each_moment_has_one_state(counts: tuple[int, ...], state: str) -> None:
    """The first that is true counts: nothing, a free worker with or without a blocked batch, executing, late rows."""
    names = ("workers", "queued", "blocked", "held", "executing", "late")
    assert limits.state_of(**dict(zip(names, counts, strict=True))) == state
