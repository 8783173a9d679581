"""The ceiling: the publisher's decoder alone, read by pg_recvlogical and thrown away.

In go a stage and a slot; out come seconds. It is the ceiling of readers that keep up, to which the publisher sends each
message alone. To one that lags it sends larger pieces, which costs it less.

Source: PostgreSQL manual, "pg_recvlogical".
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from parapply.demo.errors import DemoError
from parapply.demo.race import write_checkpoints
from parapply.demo.stage import BANK, PUBLICATION, end
from parapply.source.options import start_options

if TYPE_CHECKING:
    from bench.observe import Observer
    from parapply.demo.stage import Stage

_POLL_S = 0.002
# As for every other runner.
_TIMEOUT_S = 600.0
_RELEASE_TIMEOUT_S = 30.0


def drain_to_nowhere(stage: Stage, *, slot: str, end_lsn: str, observer: Observer) -> float:
    """Drain a slot as the daemon asks for it, drop the slot, and return the seconds from start to end.

    Args:
        stage: the servers.
        slot: with the backlog.
        end_lsn: after the backlog.
        observer: watches the processes in the meantime.

    Raises:
        DemoError: pg_recvlogical failed, or was not there in time.
    """
    log = stage.directory / "pg_recvlogical.log"
    ((version,),) = stage.source.execute("SELECT current_setting('server_version_num')::int")
    options = start_options(version, [PUBLICATION], "any")
    command = [
        str(stage.source.program("pg_recvlogical")), "--start", "--no-loop", f"--dbname={BANK}", f"--slot={slot}",
        "--file=/dev/null", f"--endpos={end_lsn}", *[f"--option={name}={value}" for name, value in options],
    ]  # fmt: skip
    write_checkpoints(stage)
    started_s = time.monotonic()
    process = stage.start(command, env=stage.source.client_env(BANK), output=log)
    observer.add("reader", process.pid)
    while (code := process.poll()) is None:
        if time.monotonic() - started_s > _TIMEOUT_S:
            end(process)
            raise DemoError(f"pg_recvlogical did not read the backlog within {_TIMEOUT_S:g} s.")
        observer.look(None)
        time.sleep(_POLL_S)
    total_s = time.monotonic() - started_s
    if code:
        raise DemoError(f"pg_recvlogical ended with {code}: {log.read_text(encoding='utf-8', errors='replace')}")
    _drop_slot(stage, slot)
    return total_s


def _drop_slot(stage: Stage, slot: str) -> None:
    """Drop a slot as soon as its walsender has noticed that its reader is gone.

    Raises:
        DemoError: it did not notice.
    """
    deadline_s = time.monotonic() + _RELEASE_TIMEOUT_S
    while stage.source.execute("SELECT active FROM pg_replication_slots WHERE slot_name = %s", [slot]) == [(True,)]:
        if time.monotonic() > deadline_s:
            raise DemoError(f"The slot {slot} is still read after pg_recvlogical has ended.")
        time.sleep(_POLL_S)
    stage.source.execute("SELECT pg_drop_replication_slot(%s)", [slot], dbname=BANK)
