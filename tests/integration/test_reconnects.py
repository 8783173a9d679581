"""A daemon that loses its stream or is reloaded, in this process, where its objects can be counted and changed."""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from parapply.config import Config, load_config
from parapply.init import init
from parapply.model import Until
from parapply.runtime.daemon import Host, Leader
from parapply.runtime.epoch import Epoch
from parapply.runtime.observe.health import Health
from parapply.runtime.observe.systemd import Notifier
from parapply.runtime.reload import Reloader
from parapply.runtime.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.databases import Database

_LOSSES = 5
_WORKERS = 3
_OF_AN_EPOCH = {"Epoch": 1, "WorkerPool": 1, "Intake": 1, "ReplicationStream": 1, "WorkerSession": _WORKERS}
#: Ends the sender of the stream and returns its process, once another than the last one has begun to send: one that
#: ends before leaves no epoch, and what its error holds is the collector's.
_END_SENDER = (
    "SELECT active_pid FROM pg_replication_slots JOIN pg_stat_replication ON pid = active_pid AND state = 'streaming'"
    " WHERE slot_name = '{slot}' AND active_pid <> {last} AND pg_terminate_backend(active_pid)"
)


@pytest.fixture
def config(source_db: Database, target_db: Database) -> Config:
    """Make a published table on both sides, slot and state."""
    source_db.execute("CREATE TABLE t (i int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    target_db.execute("CREATE TABLE t (i int PRIMARY KEY)")
    flags = {
        "source.dsn": source_db.dsn, "source.slot": f"s_{secrets.token_hex(4)}", "source.publications": ("p",),
        "source.reconnect_min_s": 0.05, "source.reconnect_max_s": 0.05, "target.dsn": target_db.dsn,
        "apply.workers": _WORKERS,
    }  # fmt: skip
    made = load_config(flags=flags, environ={})
    init(made)
    return made


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Have cycles collected only where the daemon asks for it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
async def test_nothing_of_an_ended_epoch_stays_in_memory(
    config: Config, source_db: Database, target_db: Database
) -> None:
    """However often the stream is lost, there is one of each part of an epoch, and not of those before."""
    slot_name = config.source.slot
    # Parts that other tests of this process have left to the collector; held, so that no new part takes their place.
    others = {id(one): one for one in gc.get_objects() if type(one).__name__ in _OF_AN_EPOCH}
    host = Host(Signals(), Notifier())
    running = asyncio.create_task(Leader(Reloader(config, lambda: config), Until(), host, takeover=False).run())
    last = 0
    for _ in range(_LOSSES):
        source_db.execute("INSERT INTO t SELECT coalesce(max(i), 0) + 1 FROM t")
        ended = _END_SENDER.format(slot=slot_name, last=last)
        last = await asyncio.to_thread(source_db.wait_until, ended)
    source_db.execute("INSERT INTO t VALUES (0)")
    await asyncio.to_thread(target_db.wait_until, "SELECT EXISTS (SELECT FROM t WHERE i = 0)")
    counts = Counter(type(one).__name__ for one in gc.get_objects() if id(one) not in others)
    host.signals.stop()
    assert await running == 0
    assert {name: counts[name] for name in _OF_AN_EPOCH} == _OF_AN_EPOCH


async def test_a_daemon_that_is_to_end_as_its_epoch_does_is_shown_as_stopped(
    config: Config, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload has ended the epoch, which has said that another one follows; then comes SIGTERM."""
    host = Host(Signals(), Notifier())

    async def stop(*_: object) -> None:
        host.signals.stop()

    monkeypatch.setattr(Epoch, "_confirm", stop)
    running = asyncio.create_task(Leader(Reloader(config, lambda: config), Until(), host, takeover=False).run())
    await asyncio.to_thread(target_db.wait_until, "SELECT state = 'running' FROM parapply.slots")
    host.signals.end.set()
    assert await running == 0
    assert target_db.rows("SELECT state, reason FROM parapply.slots") == [("stopped", "stopped by a signal")]


async def test_a_daemon_ends_with_a_mistake_of_the_task_that_looks_after_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nothing says why systemd hears no more of it, or why a leader that is stuck is called live."""
    monkeypatch.setattr(Health, "look", lambda *_: 1 // 0)
    leader = Leader(Reloader(config, lambda: config), Until(), Host(Signals(), Notifier()), takeover=False)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(leader.run(), 60)
