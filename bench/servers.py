"""The servers of the benchmark: which programs, which settings.

In go options; out come a stage that is not entered yet, and what it is made of.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import psutil

from parapply.demo.binaries import find_binaries, programs_of
from parapply.demo.errors import DemoError
from parapply.demo.stage import MAJOR, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from bench.disk import SlowDisk
    from bench.options import Alone, Options
    from parapply.demo.binaries import PgBinaries
    from parapply.demo.cluster import Cluster, Setting
    from parapply.demo.stage import Interrupts

# No runner shall meet a vacuum that the others did not, nor read from disk what fits into memory. PostgreSQL 15 lets
# so much time pass between the starts of workers of any two subscriptions: 5 s would count for the next turn.
_SETTINGS: Final[Mapping[str, Setting]] = {
    "autovacuum": False, "shared_buffers": "512MB", "wal_retrieve_retry_interval": "100ms",
}  # fmt: skip


def make_stage(
    interrupts: Interrupts,
    options: Options,
    disk: SlowDisk | None = None,
    *,
    is_local: bool = False,
    settings: Mapping[str, Setting] = MappingProxyType({}),
) -> Stage:
    """Return the stage for one workload.

    Args:
        interrupts: of the caller.
        options: which programs.
        disk: of the subscriber, if it can be made slow.
        is_local: systems reach the publisher by its Unix socket.
        settings: of both servers, over the settings of every benchmark.

    Raises:
        DemoError: this machine has no such servers.
    """
    target_binaries = programs_in(options.bindir_target) if options.bindir_target else find_binaries(MAJOR)
    return Stage(
        interrupts,
        name="bench",
        settings={**_SETTINGS, **settings},
        is_local=is_local,
        source_binaries=programs_in(options.bindir_source) if options.bindir_source else None,
        target_binaries=target_binaries,
        target_settings={**_origins(target_binaries), **(disk.settings(target_binaries.major) if disk else {})},
        target_environment=disk.environment if disk else None,
    )


def _origins(binaries: PgBinaries) -> dict[str, Setting]:
    """Return the setting that lets 64 workers have a replication origin each."""
    has_own_limit = binaries.major >= 18
    return {"max_active_replication_origins" if has_own_limit else "max_replication_slots": 70}


@contextmanager
def placed(stage: Stage, alone: Alone | None) -> Iterator[None]:
    """Have a server use the first core, and the other server and what this process starts use all others.

    Processes that run already are moved; those that they start later are where they are. Source: sched_setaffinity(2).

    Raises:
        DemoError: there is one core only.
    """
    if alone is None:
        yield
        return
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        raise DemoError("A server can have a core for itself only where there are two.", hint="leave --alone out")
    first = {min(cores)}
    rest = cores - first
    server, other = (stage.source, stage.target) if alone == "publisher" else (stage.target, stage.source)
    try:
        _move(server, first)
        _move(other, rest)
        os.sched_setaffinity(0, rest)
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for one in (server, other):
            _move(one, cores)


@contextmanager
def placed_on_one(stage: Stage) -> Iterator[None]:
    """Have the subscriber and what this process starts share the first core."""
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    try:
        _move(stage.target, one)
        os.sched_setaffinity(0, one)
        yield
    finally:
        os.sched_setaffinity(0, cores)
        _move(stage.target, cores)


def _move(server: Cluster, cores: set[int]) -> None:
    postmaster = psutil.Process(server.pid)
    for process in (postmaster, *postmaster.children()):
        # One of its children may have ended since.
        with suppress(psutil.NoSuchProcess):
            process.cpu_affinity(list(cores))


def versions(stage: Stage) -> dict[str, str]:
    """Return the versions of both servers, for the facts of a document."""
    return {"publisher": stage.source.binaries.version_text, "subscriber": stage.target.binaries.version_text}


def programs_in(directory: Path) -> PgBinaries:
    """Return PostgreSQL's programs in a directory of the user's choice.

    Raises:
        DemoError: it has no `initdb` and `postgres` that the account which runs servers can run.
    """
    found = programs_of(directory.absolute())
    if found is None:
        raise DemoError(
            f"{directory} has no initdb and postgres that the server's account can run.",
            hint="name a directory with initdb and postgres that every user can read",
        )
    return found
