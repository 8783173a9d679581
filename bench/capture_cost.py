"""Cost of a capture to the publisher: `python -m bench.capture_cost`.

A subscription, `pg_recvlogical`, `parapply capture` and the same with `--redact` read one load at the same time, each
from a slot of its own, so all have the same WAL and the same disturbances. Out come CPU time of each reader's sessions
on the publisher, and bytes of WAL that its slot keeps there.

Source: PostgreSQL manual, "pg_replication_slots", "pg_recvlogical".
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click
import psycopg

from bench.options import Options
from bench.output import Output
from bench.processes import ProcessWatch
from bench.report import machine_facts
from bench.servers import make_stage, versions
from bench.workloads import LARGE_ROWS
from parapply.config import SourceConfig
from parapply.demo.errors import DemoError
from parapply.demo.load import DemoLoad
from parapply.demo.race import create_slot
from parapply.demo.stage import BANK, PUBLICATION, Interrupts, end, own_environment
from parapply.errors import ParapplyError
from parapply.quoting import literal
from parapply.source.options import start_options, streaming_of

if TYPE_CHECKING:
    import subprocess
    from typing import LiteralString

    from parapply.demo.stage import Stage

#: Slots, each with the name of its reader.
_READERS: Final = {
    "subscription": "built-in subscription", "recvlogical": "pg_recvlogical", "captured": "parapply capture",
    "redacted": "parapply capture --redact",
}  # fmt: skip
#: Version of the document. Raised when a field changes its meaning or goes.
_SCHEMA_VERSION: Final = 1
_CLIENTS: Final = 4
_POLL_S: Final = 0.2
_TIMEOUT_S: Final = 120.0
#: Sessions of a reader: its walsender, and the one by which a capture asks for shapes.
_SESSIONS: Final = """
    SELECT s.slot_name || CASE WHEN a.pid = s.active_pid THEN '' ELSE ' session' END, a.pid
      FROM pg_replication_slots AS s JOIN pg_stat_activity AS a
        ON a.pid = s.active_pid OR a.application_name = 'parapply capture ' || s.slot_name"""
_KEPT: Final = """
    SELECT slot_name, (pg_current_wal_lsn() - restart_lsn)::bigint, (pg_current_wal_lsn() - confirmed_flush_lsn)::bigint
      FROM pg_replication_slots WHERE slot_name = ANY (%s)"""
_CONFIRMED: Final = "SELECT count(*) FROM pg_replication_slots WHERE active AND confirmed_flush_lsn >= %s::pg_lsn"
_ACTIVE: Final = "SELECT count(*) FROM pg_replication_slots WHERE active"
_HERE: Final = "SELECT pg_current_wal_insert_lsn()::text"


def _start(stage: Stage) -> list[subprocess.Popen[bytes]]:
    """Have all readers read, and return the processes that are ours."""
    for slot in ("subscription", "recvlogical"):
        create_slot(stage, slot)
    stage.target.execute(
        f"CREATE SUBSCRIPTION subscription CONNECTION {literal(stage.source_dsn())} PUBLICATION {PUBLICATION}"
        " WITH (create_slot = false, copy_data = false)",
        dbname=BANK,
    )
    ((version,),) = stage.source.execute("SELECT current_setting('server_version_num')::int")
    # As a capture asks with its defaults.
    asked = start_options(version, [PUBLICATION], "any", streaming=streaming_of(version, SourceConfig().streaming))
    options = [f"--option={name}={value}" for name, value in asked]
    recvlogical = [
        str(stage.source.program("pg_recvlogical")), f"--dbname={stage.source_dsn()}", "--slot=recvlogical", "--start",
        "--no-loop", "--file=/dev/null", *options,
    ]  # fmt: skip
    started = [stage.start(recvlogical, env=stage.source.client_env(BANK), output=stage.directory / "recvlogical.log")]
    for slot, more in (("captured", []), ("redacted", ["--redact"])):
        command = [
            sys.executable, "-m", "parapply", "capture", str(stage.directory / slot), "--source", stage.source_dsn(),
            "--publication", PUBLICATION, "--kept-slot", slot, *more,
        ]  # fmt: skip
        started.append(stage.start(command, env=own_environment(), output=stage.directory / f"{slot}.log"))
    return started


class _Readers:
    """All readers at work, and the samples that were taken of them."""

    def __init__(self, connection: psycopg.Connection) -> None:
        """Look at nothing yet; the connection is to the published database."""
        self._connection = connection
        self._watch = ProcessWatch()
        self._kept: dict[str, list[tuple[int, int]]] = {slot: [] for slot in _READERS}

    def one(self, query: LiteralString, *params: str) -> Any:  # noqa: ANN401  a value of any type
        """Return the value of a query."""
        ((found,),) = self._connection.execute(query, params).fetchall()
        return found

    def look(self) -> None:
        """Sample sessions and slots."""
        for slot, pid in self._connection.execute(_SESSIONS).fetchall():
            self._watch.add(slot, pid, from_start=True)
        self._watch.sample()
        for slot, whole, unconfirmed in self._connection.execute(_KEPT, [list(_READERS)]).fetchall():
            self._kept[slot].append((whole, unconfirmed))

    def wait(self, query: LiteralString, *params: str) -> None:
        """Wait until a query counts all readers.

        Raises:
            DemoError: it did not in time.
        """
        deadline_s = time.monotonic() + _TIMEOUT_S
        while self.one(query, *params) < len(_READERS):
            if time.monotonic() > deadline_s:
                raise DemoError(f"One of {', '.join(_READERS)} did not read all within {_TIMEOUT_S:g} s.")
            time.sleep(_POLL_S)

    def figures(self) -> list[dict[str, Any]]:
        """Return the cost of each reader."""
        usage = self._watch.usage()
        return [
            {
                "reader": name,
                "walsender_cpu_s": round(usage[slot].cpu_s, 2),
                "session_cpu_s": round(usage[asking].cpu_s, 2) if (asking := f"{slot} session") in usage else 0.0,
                "kept_most_bytes": max(whole for whole, _ in self._kept[slot]),
                "kept_median_bytes": int(statistics.median(whole for whole, _ in self._kept[slot])),
                "unconfirmed_most_bytes": max(later for _, later in self._kept[slot]),
                "unconfirmed_median_bytes": int(statistics.median(later for _, later in self._kept[slot])),
            }
            for slot, name in _READERS.items()
        ]


def measure(stage: Stage, transactions: int, rate: int) -> dict[str, Any]:
    """Write one load, and return its WAL and the cost of each reader.

    Args:
        stage: entered.
        transactions: of pgbench's TPC-B.
        rate: of these in a second.

    Raises:
        DemoError: a server or a program failed.
    """
    stage.fill_bank(1)
    started = _start(stage)
    with psycopg.connect(stage.source.dsn(BANK), autocommit=True) as connection:
        readers = _Readers(connection)
        readers.wait(_ACTIVE)
        connection.execute("CHECKPOINT")
        begin_lsn = readers.one(_HERE)
        begun_s = time.monotonic()
        each = transactions // _CLIENTS
        running = DemoLoad(stage, "tpcb-like", clients=_CLIENTS, limit=f"--transactions={each}", rate=rate)
        while running.is_running():
            readers.look()
            time.sleep(_POLL_S)
        seconds = time.monotonic() - begun_s
        end_lsn = readers.one(_HERE)
        readers.one("SELECT pg_logical_emit_message(true, 'parapply bench', '')::text")
        readers.wait(_CONFIRMED, end_lsn)
        readers.look()
        wal_bytes = readers.one("SELECT (%s::pg_lsn - %s::pg_lsn)::bigint", end_lsn, begin_lsn)
    for process in started:
        end(process)
    stage.target.execute("DROP SUBSCRIPTION subscription", dbname=BANK)
    return {
        "transactions": each * _CLIENTS, "rate": rate, "seconds": round(seconds, 1), "wal_bytes": wal_bytes,
        "readers": readers.figures(),
    }  # fmt: skip


@click.command()
@click.option("--transactions", type=click.IntRange(min=_CLIENTS), default=20_000, show_default=True)
@click.option("--rate", type=click.IntRange(min=1), default=500, show_default=True, help="Transactions a second.")
def command(transactions: int, rate: int) -> None:
    """Measure the cost of readers to the publisher."""
    output = Output()
    try:
        output.prepare()
        at = datetime.now(UTC)
        machine = machine_facts(os.getloadavg()[0])
        options = Options(systems=("parapply",), large_rows=LARGE_ROWS, scale=1)
        with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
            found = measure(stage, transactions, rate)
            facts = {**machine, **versions(stage)}
    except ParapplyError as error:
        raise click.ClickException(str(error)) from error
    for one in found["readers"]:
        output.say(
            f"{one['reader']:26} CPU {one['walsender_cpu_s']:6.2f} s, WAL kept {one['kept_median_bytes'] / 1e6:6.1f}"
            f" MB, not confirmed {one['unconfirmed_median_bytes'] / 1e6:6.2f} MB"
        )
    content = {
        "schema_version": _SCHEMA_VERSION, "benchmark": "cost of readers to the publisher",
        "measured_at": at.isoformat(timespec="seconds"), "machine": facts, **found,
    }  # fmt: skip
    output.save(f"capture-cost-{at:%Y%m%dT%H%M%SZ}", content)


if __name__ == "__main__":
    command()
