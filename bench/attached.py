"""One system at a time, replicating live from a slot of its own into a fresh database.

In go a stage and a system; while the block runs it replicates, and afterwards neither slot nor database is left.

Source: PostgreSQL manual, "CREATE SUBSCRIPTION".
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from psycopg import sql

from bench.proxy import delayed_port
from parapply.demo.command import Parapply
from parapply.demo.race import create_slot, drop_target, make_target, write_checkpoints
from parapply.demo.stage import PUBLICATION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.options import Sync
    from parapply.demo.stage import Stage

SubscriptionStreaming = Literal["off", "on", "parallel"]


@dataclass(frozen=True, kw_only=True)
class System:
    """A system to measure.

    Attributes:
        name: for people.
        settings: `key=value` for parapply; `None` for the built-in subscription.
        target_delay_s: seconds each way between parapply and the subscriber; the built-in one is inside of it.
        streaming: of the built-in subscription; parapply has it in its settings.
        sync: synchronous_commit of the built-in subscription, likewise.
    """

    name: str
    settings: tuple[str, ...] | None = None
    target_delay_s: float = 0.0
    streaming: SubscriptionStreaming = "off"
    sync: Sync = "off"


class Attached:
    """A system that replicates."""

    def __init__(self, daemon: Parapply | None = None) -> None:
        """Take what was started.

        Args:
            daemon: parapply; `None` for the built-in subscription, whose workers start again by themselves.
        """
        self._daemon = daemon

    @property
    def daemon_pid(self) -> int | None:
        """Process id of parapply; `None` for the built-in subscription."""
        return self._daemon.pid if self._daemon else None

    def check(self) -> None:
        """Do nothing if the system runs.

        Raises:
            DemoError: it does not.
        """
        if self._daemon:
            self._daemon.check()


@contextmanager
def attached(stage: Stage, system: System, name: str, *, settings: Sequence[str] = ()) -> Iterator[Attached]:
    """Have a system replicate while the block runs.

    Args:
        stage: whose publisher has a database and a publication, and whose subscriber has what the system starts from.
        system: the one that replicates.
        name: of slot, database and subscription.
        settings: further ones for parapply.

    Raises:
        DemoError: a server or the system failed.
    """
    create_slot(stage, name)
    make_target(stage, name)
    write_checkpoints(stage)
    if system.settings is None:
        _subscribe(stage, name, system)
        yield Attached()
        for command in ("ALTER SUBSCRIPTION {} DISABLE", "DROP SUBSCRIPTION {}"):
            stage.target.execute(sql.SQL(command).format(sql.Identifier(name)), dbname=name)
    else:
        is_far = system.target_delay_s > 0
        with delayed_port("127.0.0.1", stage.target.port, system.target_delay_s) if is_far else nullcontext() as port:
            daemon = Parapply(
                stage, slot=name, target_dbname=name, target_port=port, settings=[*system.settings, *settings]
            )
            daemon.call("init")
            daemon.start()
            yield Attached(daemon)
            daemon.stop()
            daemon.call("drop", "--yes")
    drop_target(stage, name)


def _subscribe(stage: Stage, name: str, system: System) -> None:
    """Make the built-in subscription on the slot."""
    identifier = sql.Identifier(name)
    create = sql.SQL(
        "CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION {} WITH (slot_name = {}, create_slot = false,"
        " copy_data = false, streaming = {}, synchronous_commit = {})"
    ).format(
        identifier,
        sql.Literal(stage.source_dsn()),
        sql.Identifier(PUBLICATION),
        identifier,
        sql.Literal(system.streaming),
        sql.Literal(system.sync),
    )
    stage.target.execute(create, dbname=name)
