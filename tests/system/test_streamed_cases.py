"""PostgreSQL's own cases of streamed transactions, and more of their kind, in every way there is to apply them.

All cases go through the same streams once, with the built-in subscription beside them (`tests/fixtures/fan.py`): each
target must hold what that one holds, which applies streams at their commit, and what the source holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.fan import Fan, Fans, Variant
from tests.fixtures.rotation import values_of
from tests.system.stream_cases import CASES, SETUP

if TYPE_CHECKING:
    from tests.fixtures.servers import ServerPool

# The daemons have run before the first test looks; on a busy machine that takes its time.
pytestmark = [pytest.mark.timeout(300), pytest.mark.in_turn("variant")]

FOLLOW = {"apply.stream_start_bytes": 0}
#: A quarter of it is a piece: what has more is applied alone, in pieces, from its file.
IN_PIECES = {"apply.memory_limit_bytes": 1 << 24, "apply.max_batch_bytes": 1 << 20}

FOLLOWED = Variant(workers=4, mode="live", settings=FOLLOW, name="followed")
KEPT = Variant(workers=1, mode="live", settings={**FOLLOW, **IN_PIECES}, name="kept")
SMALL = Variant(workers=4, mode="live", settings={"apply.stream_start_bytes": 1 << 30}, name="small")
RELAXED = Variant(workers=4, mode="live", settings={**FOLLOW, "apply.commit_order": "relaxed"}, name="relaxed")
BACKLOG = Variant(workers=2, mode="backlog", settings={**FOLLOW, **IN_PIECES}, name="backlog")
#: Messages of a server differ by version, their handling does not: one way also reads them on the oldest.
EVERYWHERE = (FOLLOWED,)
ON_18 = (KEPT, SMALL, RELAXED, BACKLOG)
_WITH_ALL = 18
NAMES = [case.name for case in CASES]


@pytest.fixture(scope="module")
def fans(server_pool: ServerPool, request: pytest.FixtureRequest) -> Fans:
    """The cases, run when first asked for."""

    def make(major: int) -> Fan:
        source, target = server_pool.get("source", major), server_pool.get("target", major)
        publication = "CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root)"
        variants = values_of(request, "variant", major)
        return Fan(source, target, CASES, variants, setup=SETUP, publication=publication)

    return Fans(make)


@pytest.fixture
def fan(fans: Fans, pg_major: int) -> Fan:
    """The cases on this test's major version."""
    return fans.get(pg_major)


@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize("variant", EVERYWHERE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_streamed_transaction_ends_as_on_the_source(fan: Fan, variant: Variant, name: str) -> None:
    """Chunks, subtransactions, rollbacks and schema changes leave what the built-in subscription and the source have.

    Followed by a worker (traps T-51, T-52).
    """
    fan.check(variant, name)


@pytest.mark.pg_majors(_WITH_ALL)
@pytest.mark.parametrize("variant", ON_18, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_way_ends_alike(fan: Fan, variant: Variant, name: str) -> None:
    """The same kept and applied in pieces after the commit, merged, out of order, and from a backlog (T-51, T-52)."""
    fan.check(variant, name)


@pytest.mark.pg_majors(15, 18)
@pytest.mark.parametrize("variant", EVERYWHERE, ids=str)
def test_a_worker_follows_where_one_may(fan: Fan, variant: Variant) -> None:
    """A worker follows where one may, and gives up only for a reason."""
    _check_followed(fan, variant)


@pytest.mark.pg_majors(_WITH_ALL)
@pytest.mark.parametrize("variant", ON_18, ids=str)
def test_each_way_is_taken(fan: Fan, variant: Variant) -> None:
    """With one worker, or if it is small, no stream is followed, else where one may."""
    if variant not in (KEPT, SMALL):
        _check_followed(fan, variant)
        return
    outcome = fan.outcomes[str(variant)]
    assert not outcome.problem, outcome.problem
    assert not [event for event in outcome.events if event["event"] == "stream_followed"]


def _check_followed(fan: Fan, variant: Variant) -> None:
    outcome = fan.outcomes[str(variant)]
    assert not outcome.problem, outcome.problem
    followed = [event for event in outcome.events if event["event"] == "stream_followed"]
    assert len(followed) >= len(CASES) // 2, f"only {len(followed)} streams were followed"
    reasons = {event["reason"] for event in outcome.events if event["event"] == "stream_spilled"}
    assert reasons <= {
        "more than 64 subtransactions",
        "TRUNCATE would lock the table until the commit",
        "code runs on the target for a table of it",
    }, reasons
