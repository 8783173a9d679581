"""The ceiling: the publisher's decoder alone, read in two ways and thrown away.

`pg_recvlogical` is a reader of the stream that keeps up, to which the publisher sends each change as a message of its
own. To one that lags it sends larger pieces, which costs it less. The query has the same changes decoded by the same
plugin and sent as the rows of one COPY; psql reads it, over the same connection.

In go a stage, a slot and the way; out come seconds.

Source: PostgreSQL manual, "pg_recvlogical", "Replication Management Functions".
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from bench.runners import BY_QUERY, CEILING
from parapply.demo.errors import DemoError
from parapply.demo.race import write_checkpoints
from parapply.demo.stage import BANK, PUBLICATION, end
from parapply.quoting import literal
from parapply.source.options import start_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.observe import Observer
    from parapply.demo.stage import Stage

_POLL_S = 0.002
# As for every other runner.
_TIMEOUT_S = 600.0
_RELEASE_TIMEOUT_S = 30.0
_PROGRAMS: Final[Mapping[str, str]] = {CEILING: "pg_recvlogical", BY_QUERY: "psql"}
# The publisher keeps the query's rows until all are decoded: as much in memory as for a range of `source.catch_up`.
_WORK_MEM: Final = "64MB"


def drain_to_nowhere(stage: Stage, *, reader: str, slot: str, end_lsn: str, observer: Observer) -> float:
    """Read a slot as the daemon asks for it, drop the slot, and return the seconds from start to end.

    Args:
        stage: the servers.
        reader: the runner, `CEILING` or `BY_QUERY`.
        slot: with the backlog.
        end_lsn: after the backlog.
        observer: watches the processes in the meantime.

    Raises:
        DemoError: the program failed, or was not there in time.
    """
    name = _PROGRAMS[reader]
    log = stage.directory / f"{name}.log"
    ((version,),) = stage.source.execute("SELECT current_setting('server_version_num')::int")
    options = start_options(version, [PUBLICATION], "any")
    words = _recvlogical_words(slot, end_lsn, options) if reader == CEILING else _psql_words(slot, options)
    command = [str(stage.source.program(name)), f"--dbname={stage.source_dsn()}", *words]
    write_checkpoints(stage)
    started_s = time.monotonic()
    process = stage.start(command, env=stage.source.client_env(BANK), output=log)
    observer.add("reader", process.pid)
    while (code := process.poll()) is None:
        if time.monotonic() - started_s > _TIMEOUT_S:
            end(process)
            raise DemoError(f"{name} did not read the backlog within {_TIMEOUT_S:g} s.")
        observer.look(None)
        time.sleep(_POLL_S)
    total_s = time.monotonic() - started_s
    if code:
        raise DemoError(f"{name} ended with {code}: {log.read_text(encoding='utf-8', errors='replace')}")
    _drop_slot(stage, slot)
    return total_s


def query_sql(slot: str, options: Sequence[tuple[str, str]]) -> str:
    """Return the query for everything that a slot holds; it consumes nothing.

    Args:
        slot: its name.
        options: pgoutput's, of `start_options`.
    """
    words = ", ".join(literal(word) for pair in options for word in pair)
    changes = f"pg_logical_slot_peek_binary_changes({literal(slot)}, NULL, NULL, {words})"
    return f"COPY (SELECT lsn, xid, data FROM {changes}) TO STDOUT (FORMAT binary)"  # noqa: S608  literals


def _recvlogical_words(slot: str, end_lsn: str, options: Sequence[tuple[str, str]]) -> list[str]:
    start = ["--start", "--no-loop", f"--slot={slot}", "--file=/dev/null", f"--endpos={end_lsn}"]
    return [*start, *[f"--option={name}={value}" for name, value in options]]


def _psql_words(slot: str, options: Sequence[tuple[str, str]]) -> list[str]:
    start = ["--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--output=/dev/null"]
    return [*start, f"--command=SET work_mem = {literal(_WORK_MEM)}", f"--command={query_sql(slot, options)}"]


def _drop_slot(stage: Stage, slot: str) -> None:
    """Drop a slot as soon as the publisher has noticed that its reader is gone.

    Raises:
        DemoError: it did not notice.
    """
    deadline_s = time.monotonic() + _RELEASE_TIMEOUT_S
    while stage.source.execute("SELECT active FROM pg_replication_slots WHERE slot_name = %s", [slot]) == [(True,)]:
        if time.monotonic() > deadline_s:
            raise DemoError(f"The slot {slot} is still read after its reader has ended.")
        time.sleep(_POLL_S)
    stage.source.execute("SELECT pg_drop_replication_slot(%s)", [slot], dbname=BANK)
