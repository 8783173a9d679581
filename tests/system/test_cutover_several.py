"""One command cuts several databases over: all or none, killed anywhere, and back again."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from parapply.config_fleet import slot_name
from parapply.printable import printable
from parapply.quoting import toml_string
from tests.fixtures.fleet import PREFIX, Databases, FileRoute, wait_for
from tests.fixtures.plain import FAST, check_equal, commit_each
from tests.fixtures.route import Route

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon
    from tests.fixtures.servers import ServerPool

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

_HOSTILE = "cut\"o'ver %s <b>"
_NAMES = ["cutover_first", _HOSTILE, "cutover_third"]
#: Each kill is of the command that goes on with what the one before has left; the number counts all databases.
_KILLS = (
    "cutover_preparing:kill:2", "cutover_fencing:kill:3", "cutover_stopping:kill:2", "cutover_turning:kill:3",
    "cutover_opening:kill:1",
)  # fmt: skip


class _Instance:
    """Three databases, the file of their streams, and the template of the way back."""

    def __init__(self, databases: Databases, run_command: RunCommand, start_daemon: StartDaemon) -> None:
        databases.add(*_NAMES)
        self.databases = databases
        self.back_path = databases.path.with_name("back.toml")
        first = databases.routes[_NAMES[0]]
        # One role for both directions, which may write on either side.
        databases.write(_NAMES, {"source.dsn": first.source.dsn, "target.dsn": first.target.dsn})
        values = {
            "source.dsn": first.target.dsn, "source.slot": f"{PREFIX}_back", "target.dsn": first.source.dsn, **FAST,
        }  # fmt: skip
        lines = [f"{key} = {toml_string(value) if isinstance(value, str) else value}" for key, value in values.items()]
        self.back_path.write_text("\n".join(['source.publications = ["pub_back"]', *lines]), encoding="utf-8")
        self._run, self._start = run_command, start_daemon

    @property
    def routes(self) -> list[Route]:
        """Return the streams ahead."""
        return list(self.databases.routes.values())

    def cutover(self, *words: str, point: str = "") -> subprocess.CompletedProcess[str]:
        """Run the command; sessions of the test are closed before."""
        for route in self.routes:
            route.source.forget()
            route.target.forget()
        environ = {"PARAPPLY_FAILPOINT": point} if point else {}
        files = ("--config", str(self.databases.path), "--reverse", str(self.back_path))
        return self._run(self.databases.file_route(), "cutover", *files, *words, environ=environ)

    def start(self) -> Daemon:
        """Start the daemon of all streams ahead, and return it when each reads."""
        daemon = self.databases.start(self._start)
        for route in self.routes:
            wait_for(daemon, "source_connected", route)
        return daemon

    def start_back(self) -> tuple[Daemon, list[Route]]:
        """Start the daemon of all ways back."""
        listed = self.back_path.with_name("back_fleet.toml")
        text = f"databases = [{', '.join(map(toml_string, _NAMES))}]\n{self.back_path.read_text(encoding='utf-8')}"
        listed.write_text(text, encoding="utf-8")
        first = self.routes[0]
        route = FileRoute(source=first.target, target=first.source)
        daemon = self._start(route, "--config", str(listed))
        routes = [
            Route(source=one.target, target=one.source, slot=slot_name(f"{PREFIX}_back", name))
            for name, one in self.databases.routes.items()
        ]
        for one in routes:
            wait_for(daemon, "source_connected", one)
        return daemon, routes


@pytest.fixture
def instance(
    server_pool: ServerPool, pg_major: int, tmp_path: Path, run_command: RunCommand, start_daemon: StartDaemon
) -> Iterator[_Instance]:
    """Databases on the session's servers, which go after their daemons."""
    found = Databases(server_pool.get("source", pg_major), server_pool.get("target", pg_major), tmp_path / "fleet.toml")
    yield _Instance(found, run_command, start_daemon)
    found.drop()


def _slots(route: Route) -> list[str]:
    """Return the slots of both ends of a stream ahead."""
    query = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
    return [str(name) for end in (route.source, route.target) for (name,) in end.rows(query)]


def test_killed_anywhere_all_take_over_and_go_back(instance: _Instance) -> None:
    """Up to the first that is open `--undo` takes all back; from then on the same command opens the others also."""
    instance.start()
    for route in instance.routes:
        commit_each(route.source, 1, 30)
    for point in _KILLS:
        killed = instance.cutover(point=point)
        assert killed.returncode == -signal.SIGKILL, f"{point} was not reached: {killed.stdout}{killed.stderr}"
    undone = instance.cutover("--undo")
    assert (undone.returncode, "it cannot be undone" in undone.stdout) == (4, True), undone.stdout
    done = instance.cutover()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{printable(_HOSTILE)}: 8/9 opening: the target takes over" in done.stdout
    for route in instance.routes:
        check_equal(route)
        assert len(_slots(route)) == 1
    daemon, routes = instance.start_back()
    for route in routes:
        commit_each(route.source, 101, 130)
        route.wait_caught_up(check=daemon.check_running)
    back = instance.cutover("--back")
    assert back.returncode == 0, back.stdout + back.stderr
    for route in instance.routes:
        check_equal(route)
        commit_each(route.source, 201, 203)


@pytest.mark.in_turn("point")
@pytest.mark.parametrize("point", ["cutover_draining", "cutover_stopping", "cutover_turning"])
def test_a_failure_of_one_takes_all_back(instance: _Instance, point: str) -> None:
    """Nothing is left of the cut-over in any database, and each source takes writes; then all can be cut over."""
    instance.start()
    failed = instance.cutover(point=f"{point}:raise-lost:2")
    assert failed.returncode == 4, failed.stdout + failed.stderr
    assert failed.stdout.count("everything was taken back") == len(_NAMES), failed.stdout + failed.stderr
    assert failed.stdout.count("this database is not cut over, because") == len(_NAMES) - 1
    for route in instance.routes:
        commit_each(route.source, 1, 3)
        assert _slots(route) == [route.slot]
        assert route.target.rows("SELECT count(*) FROM parapply.cutovers") == [(0,)]


def test_one_that_is_not_ready_keeps_all_from_it(instance: _Instance) -> None:
    """A database that is refused before the fence is named with its hint; no client waits. One is cut over alone."""
    instance.start()
    hostile = instance.databases.routes[_HOSTILE]
    hostile.target.execute("DROP TABLE evt")
    refused = instance.cutover()
    assert refused.returncode == 4, refused.stdout + refused.stderr
    assert "2/9 fencing" not in refused.stdout
    for route in instance.routes:
        commit_each(route.source, 1, 3)
        assert _slots(route) == [route.slot]
    alone = instance.cutover("--include-databases", _NAMES[0])
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert [len(_slots(route)) for route in instance.routes] == [1, 1, 1]
