"""One random case: tables, a stream and daemons drawn by a seed, run and compared with the built-in subscription.

In go a seed and servers; out comes nothing, or an AssertionError that says which rows of which table differ. A seed
repeats tables, transactions, their order and the settings; when a daemon meets what is left to the machine.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parapply import failpoints
from tests.differential.compare import check_builtin, check_target, read_source, read_target
from tests.differential.live import LiveChanges
from tests.differential.schema import RandomSchema, random_schema
from tests.differential.stream import RandomStream
from tests.differential.types import Feature
from tests.differential.ways import Way, random_ways
from tests.fixtures.builtin import BuiltinSubscription
from tests.fixtures.daemon import Daemon
from tests.fixtures.databases import create_end, drop_database
from tests.fixtures.fan import make_slot
from tests.fixtures.route import Route
from tests.fixtures.streams import stream_everything
from tests.fixtures.two_phase import TWO_PHASE, check_nothing_is_left

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parapply.demo.server import PgServer
    from tests.fixtures.databases import Database

#: Newest first; those that are on the machine are drawn.
MAJORS = (18, 17, 16, 15)
_TRANSACTIONS = 200
_CATCH_UP_TIMEOUT_S = 120.0
_MOST_CRASHES = 4
_POINTS = tuple(sorted(failpoints.NAMES - {failpoints.DRAIN}))
_FEATURES_SQL = """
SELECT name FROM pg_available_extensions WHERE name IN ('citext', 'hstore')
UNION ALL SELECT 'icu' WHERE EXISTS (SELECT FROM pg_collation WHERE collname = 'und-x-icu')
"""
_FAILED_BUILTIN = "SELECT sum(apply_error_count)::int FROM pg_stat_subscription_stats"


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Where a case runs; both are shared with other cases."""

    source: PgServer
    target: PgServer

    @property
    def features(self) -> frozenset[Feature]:
        """The features that both have."""
        one, other = ({Feature(name) for (name,) in server.execute(_FEATURES_SQL)} for server in self._both)
        return frozenset(one & other)

    @property
    def _both(self) -> tuple[PgServer, PgServer]:
        return self.source, self.target


@dataclass(frozen=True, kw_only=True)
class RandomCase:
    """A drawn case without its tables, which depend on the servers.

    Attributes:
        seed: of everything.
        drawn_from: the versions that publisher and target were drawn from.
        majors: of publisher and target.
        ways: how each daemon applies.
        start_at: daemons are started before the stream (0), in its middle (1), or after it (2).
        is_two_phase: some transactions are prepared.
        crashes: by daemon, the points at which it is killed, one after the other.
        only: names of the kinds of tables; the usual ones when empty.
    """

    seed: int
    drawn_from: tuple[int, ...]
    majors: tuple[int, int]
    ways: Sequence[Way]
    start_at: int
    is_two_phase: bool
    crashes: Sequence[Sequence[str]]
    only: Sequence[str] = ()

    def __str__(self) -> str:
        """Return it for people, on several lines."""
        source, target = self.majors
        lines = [
            f"seed {self.seed}: PostgreSQL {source} to {target}, daemons start"
            f" {('before the stream', 'in its middle', 'after it')[self.start_at]}"
            + (", two-phase commit" if self.is_two_phase else "")
        ]
        for way, points in zip(self.ways, self.crashes, strict=True):
            killed = f"; killed at {', '.join(points)}" if points else ""
            lines.append(f"  {way}{killed}")
        majors = ",".join(map(str, self.drawn_from))
        kills = "" if any(self.crashes) else " --no-crashes"
        kinds = f" --kinds {','.join(self.only)}" if self.only else ""
        lines.append(f"  again: python -m tests.differential --seed {self.seed} --majors {majors}{kinds}{kills}")
        return "\n".join(lines)


def draw_case(seed: int, majors: Sequence[int], *, has_crashes: bool = False, only: Sequence[str] = ()) -> RandomCase:
    """Return the case of a seed.

    Args:
        seed: of everything.
        majors: versions to draw publisher and target from.
        has_crashes: daemons are killed on the way; the same case otherwise.
        only: see `RandomCase`.
    """
    chooser = random.Random(f"case {seed}")
    drawn_from = tuple(sorted(majors, reverse=True))
    pair = (chooser.choice(drawn_from), chooser.choice(drawn_from))
    ways = random_ways(seed)
    start_at, is_two_phase = chooser.randrange(3), chooser.random() < 0.4
    crashes = [_crashes(chooser) if has_crashes else () for _ in ways]
    return RandomCase(
        seed=seed,
        drawn_from=drawn_from,
        majors=pair,
        ways=ways,
        start_at=start_at,
        is_two_phase=is_two_phase,
        crashes=crashes,
        only=only,
    )


def _crashes(chooser: random.Random) -> list[str]:
    """Return failpoints, some of which a daemon passes never."""
    return [
        f"{chooser.choice(_POINTS)}:kill:{chooser.choice((1, 1, 2, 5, 20))}"
        for _ in range(chooser.randint(0, _MOST_CRASHES))
    ]


class Applier:
    """A route and its daemon, which is started again when it was killed at a failpoint."""

    def __init__(self, route: Route, points: Sequence[str]) -> None:
        self.route = route
        self.daemons: list[Daemon] = []
        self._points = list(points)

    def adopt(self) -> None:
        """Note the slot on the target while nothing is prepared: behind a PREPARE no daemon takes it over."""
        daemon = Daemon(self.route)
        try:
            daemon.wait_for_event("source_connected")
            daemon.stop()
        finally:
            daemon.end()

    def start(self) -> None:
        """Start the daemon with the next failpoint, if there is one."""
        environ = {"PARAPPLY_FAILPOINT": self._points.pop(0)} if self._points else {}
        self.daemons.append(Daemon(self.route, environ=environ))

    def tend(self) -> None:
        """Start the daemon again if it has been killed; fail if it ended otherwise."""
        if not self.daemons or self._daemon.is_running():
            return
        code = self._daemon.exit_code()
        assert code == -signal.SIGKILL, f"the daemon ended with {code}:\n{self._daemon.log_tail()}"
        self.start()

    def catch_up(self) -> None:
        """Return when the target shows everything, and end the daemon in order."""
        while not self._daemon.events_of("source_connected"):
            self.tend()
            self._daemon.runs_for(0.02)
        self.route.wait_caught_up(_CATCH_UP_TIMEOUT_S, check=self.tend)
        # An armed point may be passed while the daemon ends.
        self._daemon.send(signal.SIGTERM)
        code = self._daemon.exit_code(_CATCH_UP_TIMEOUT_S)
        failed = self.events_of("batch_failed")
        assert not failed, f"a batch failed: {failed[:2]}"
        assert code in {0, -signal.SIGKILL}, f"SIGTERM ended the daemon with {code}:\n{self._daemon.log_tail()}"

    def end(self) -> None:
        """Leave nothing that runs."""
        for daemon in self.daemons:
            daemon.end()

    def events_of(self, name: str) -> list[dict[str, Any]]:
        """Return the log lines of an event of all its daemons."""
        return [event for daemon in self.daemons for event in daemon.events_of(name)]

    def log(self) -> str:
        """Return the end of the last daemon's log."""
        return self._daemon.log_tail() if self.daemons else "no daemon was started"

    @property
    def _daemon(self) -> Daemon:
        return self.daemons[-1]


def run_case(case: RandomCase, servers: Servers) -> Counter[str]:
    """Run a case to its end and compare.

    Returns:
        what happened, by a name: transactions and daemons.

    Raises:
        AssertionError: a daemon failed or left other rows than the built-in subscription; a note names the case.
    """
    schema = random_schema(case.seed, servers.features, case.only)
    with ExitStack() as stack:
        try:
            return _run(case, schema, servers, stack)
        except BaseException as error:
            error.add_note(str(case))
            raise


def _run(case: RandomCase, schema: RandomSchema, servers: Servers, stack: ExitStack) -> Counter[str]:
    source = new_database(servers.source, "source", stack)
    source.execute(schema.source_sql())
    stream_everything(source)
    target = new_database(servers.target, "builtin", stack)
    routes = [
        Route(
            source=source, target=new_database(servers.target, "target", stack),
            settings={**TWO_PHASE, **way.settings, "source.two_phase": str(case.is_two_phase).lower()},
        )
        for way in case.ways
    ]  # fmt: skip
    for database in (target, *(route.target for route in routes)):
        database.execute(schema.target_sql())
    builtin = BuiltinSubscription(source, target, two_phase=case.is_two_phase)
    appliers = [Applier(route, points) for route, points in zip(routes, case.crashes, strict=True)]
    for number, applier in enumerate(appliers):
        # A transaction prepared before a slot has two-phase commit comes with its outcome: both ways, in one case.
        make_slot(applier.route, is_two_phase=case.is_two_phase and number > 0)
        stack.callback(applier.end)
        if case.is_two_phase and number > 0:
            applier.adopt()
    live = LiveChanges([route.target for route in routes], target, schema.tables, seed=case.seed)
    counts = _follow(case, schema, source, appliers, live)
    _wait_builtin(builtin, target)
    live.finish(target)
    wanted, serial = read_source(source, schema.tables), read_target(target, schema.tables)
    for way, applier in zip(case.ways, appliers, strict=True):
        try:
            applier.catch_up()
            live.finish(applier.route.target)
            check_target(wanted, serial, applier.route.target, schema.tables, role=way.role)
            if case.is_two_phase:
                check_nothing_is_left(applier.route.target)
        except BaseException as error:
            error.add_note(f"{way}\n{applier.log()}")
            raise
        counts["streams followed"] += len(applier.events_of("stream_followed"))
        counts["times behind"] += len(applier.events_of("catch_up_entered"))
    check_builtin(wanted, serial, schema.tables)
    counts["daemons killed"] = sum(len(applier.daemons) - 1 for applier in appliers)
    return counts


def new_database(server: PgServer, role: str, stack: ExitStack) -> Database:
    """Return an empty database that goes with the stack."""
    database = create_end(server, role)
    stack.callback(drop_database, database)
    return database


def _follow(
    case: RandomCase, schema: RandomSchema, source: Database, appliers: Sequence[Applier], live: LiveChanges
) -> Counter[str]:  # fmt: skip
    """Run the stream with the daemons started before it, in its middle, or after it."""

    def tend() -> None:
        for applier in appliers:
            applier.tend()
        live.go_on()

    with RandomStream(source, schema.tables, seed=case.seed, is_two_phase=case.is_two_phase) as load:
        for part in range(2):
            if case.start_at == part:
                _start(appliers)
            load.run(_TRANSACTIONS // 2, tend)
    if case.start_at == 2:
        _start(appliers)
    done = load.counts
    assert done.committed > done.refused, f"most of the stream was refused, so it tests nothing: {done}"
    return Counter({"committed": done.committed, "refused": done.refused, "prepared": done.prepared})


def _start(appliers: Sequence[Applier]) -> None:
    for applier in appliers:
        applier.start()


def _wait_builtin(builtin: BuiltinSubscription, target: Database) -> None:
    try:
        builtin.wait_caught_up(_CATCH_UP_TIMEOUT_S)
    except AssertionError as error:
        error.add_note(f"errors of the built-in subscription: {target.rows(_FAILED_BUILTIN)}")
        raise
