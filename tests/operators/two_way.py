"""Two nodes that replicate to each other (docs/CONFLICTS.md): each key is written on one of them, so nothing conflicts.

The model knows every acknowledged row. A node has its own rows at any moment; when both daemons have come to the
end, both nodes hold exactly the rows of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from parapply import failpoints
from tests.fixtures.route import Route
from tests.operators.lab import Violation
from tests.operators.rules_base import OneStream
from tests.operators.world import World, both, make_world

if TYPE_CHECKING:
    from collections.abc import Callable

_NODES = st.integers(0, 1)
_KEYS = st.integers(1, 5)
_POLICIES = {
    f"conflict.{kind}": "last_update_wins"
    for kind in (
        "insert_exists", "update_exists", "multiple_unique_conflicts", "update_origin_differs", "delete_origin_differs",
    )
} | {"conflict.update_missing": "skip", "conflict.delete_missing": "skip", "source.origin": "none"}  # fmt: skip
_POINTS = ("", failpoints.COPY_PART, failpoints.COPY_BEGUN, failpoints.COPY_TABLE_DONE)


class TwoWay(OneStream):
    """Node 0 is the world's source, node 1 its target; `ways[n]` leads to node n."""

    def __init__(self) -> None:
        """Begin an example."""
        super().__init__()
        self.ways: list[World] = []
        self.rows: list[dict[int, str]] = [{}, {}]

    @initialize(pair=st.tuples(st.integers(0, 3), st.integers(0, 3)), rows=st.integers(0, 3))
    def begin_example(self, pair: tuple[int, int], rows: int) -> None:
        """Make both nodes and both streams."""
        majors = [major for major in self.lab.majors if major >= 16]
        if self.lab.is_over or not majors:
            return
        with self._told():
            chosen = majors[pair[0] % len(majors)], majors[pair[1] % len(majors)]
            world = make_world(self.lab, chosen, settings=_POLICIES, slot="to_1")
            self.world = world
            both(
                world,
                ["CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLES IN SCHEMA public"],
            )
            for key in range(1, rows + 1):
                self._put(0, key)
            route = world.route
            other = Route(
                source=route.target, target=route.source, settings=route.settings, source_dsn=route.target_dsn,
                target_dsn=route.source_dsn, slot=route.slot.replace("to_1", "to_0"),
            )  # fmt: skip
            self.ways = [World(lab=self.lab, route=other, script=world.script), world]
            for number, way in ((1, ["init", "--copy"]), (0, ["init"])):
                done = self.ways[number].command(*way)
                assert done.returncode == 0, done.stderr
                self.ways[number].start()

    def _put(self, node: int, key: int) -> None:
        """Write a node's own row."""
        assert self.world is not None
        key, value = key + 10 * node, self.value()
        text = f"INSERT INTO t VALUES ({key}, '{value}') ON CONFLICT (id) DO UPDATE SET v = excluded.v"
        if (self.world.on_target if node else self.world.on_source)(text):
            self.rows[node][key] = value

    def _remove(self, node: int, key: int) -> None:
        assert self.world is not None
        key += 10 * node
        if (self.world.on_target if node else self.world.on_source)(f"DELETE FROM t WHERE id = {key}"):
            self.rows[node].pop(key, None)

    def do(self, name: str, action: Callable[[], object]) -> None:
        """Do a step, and look at both nodes."""
        if self.world is None or self._is_failed or self.lab.is_over:
            return
        self.lab.counts[f"step {name}"] += 1
        with self._told():
            action()
            self._look()

    def _held(self, node: int) -> dict[int, str]:
        return dict(self.ways[1 - node].source.rows("SELECT id, v FROM t"))

    def _look(self) -> None:
        if all(way.daemon for way in self.ways):
            self._settle()
        for node in (0, 1):
            held = self._held(node)
            lost = {key: value for key, value in self.rows[node].items() if held.get(key) != value}
            more = {key for key in held if key // 10 == node} - self.rows[node].keys()
            if lost or more:
                raise Violation(f"node {node}: its own rows {lost} are gone or old, {more} are back; it holds {held}")
        if all(way.daemon and not way.told() for way in self.ways):
            expected = {**self.rows[0], **self.rows[1]}
            for node in (0, 1):
                if (held := self._held(node)) != expected:
                    raise Violation(f"node {node} holds {held}, expected {expected}; {self.ways[node]._state()}")

    def _settle(self) -> None:
        for way in (*self.ways, *self.ways):
            if not way.settle():
                return

    @rule(node=_NODES, key=_KEYS)
    def put(self, node: int, key: int) -> None:
        """A node's own row is written there."""
        self.do("row", lambda: self._put(node, key))

    @rule(node=_NODES, key=_KEYS)
    def remove(self, node: int, key: int) -> None:
        """A node's own row is deleted there."""
        self.do("delete", lambda: self._remove(node, key))

    @rule(node=_NODES)
    def stop(self, node: int) -> None:
        """A daemon ends."""
        self.do("stop", lambda: self.ways[node].stop())

    @rule(node=_NODES)
    def kill(self, node: int) -> None:
        """A daemon is killed."""
        self.do("kill", lambda: self.ways[node].kill())

    @rule(node=_NODES)
    def run(self, node: int) -> None:
        """A daemon starts."""
        self.do("run", lambda: self.ways[node].start())

    @precondition(lambda self: self.ways)
    @rule(node=_NODES, key=_KEYS, point=st.sampled_from(_POINTS), is_truncated=st.booleans())
    def refresh(self, node: int, key: int, point: str, is_truncated: bool) -> None:
        """A node's table is copied again, while the other node's rows change; its own rows exist before."""

        def action() -> None:
            for way in self.ways:
                way.start()
            self._settle()
            words = ["refresh", "--table", "public.t", *(["--truncate"] if is_truncated else [])]
            if point:
                self.ways[node].beside(words, point, lambda: self._put(1 - node, key))
            else:
                self.ways[node].command(*words)

        self.do("refresh", action)

    def teardown(self) -> None:
        """End: both daemons run, whatever waits is copied, both nodes are equal, and `drop` leaves nothing."""
        world = self.world
        if world is None:
            return
        try:
            if not self._is_failed and not self.lab.is_over:
                with self._told():
                    self._finish()
                self.lab.counts["examples"] += 1
        finally:
            for way in self.ways:
                if way.daemon:
                    way.daemon.end()
                    way.daemon = None
            world.close()
            self.world = None

    def _finish(self) -> None:
        for _ in range(3):
            for way in self.ways:
                way.start()
            self._settle()
            for way in self.ways:
                way.renew()
        self._look()
        for way in self.ways:
            way.stop()
        for way in self.ways:
            done = way.command("drop", "--yes")
            if done.returncode:
                raise Violation(f"drop is refused: {done.stderr}")
