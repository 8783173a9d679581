"""`python -m bench.micro.decoders`: CPU of a publisher whose backlog several sessions decode, each a range each.

Transactions of one change are written, and the publisher logs its running transactions many times. Ranges
begin at these points, because decoding begins there too. Each of k readers has a copy of the slot that was advanced to
its range, and reads this range with `pg_recvlogical`. Out come, for each k, seconds of CPU of the whole publisher, with
the part for advancing, and wall time.

Source: PostgreSQL manual, "pg_log_standby_snapshot", "pg_replication_slot_advance", "pg_recvlogical".
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import psycopg

from bench.output import write_result
from bench.processes import server_cpu_s
from bench.report import machine_facts
from parapply.demo.binaries import find_binaries
from parapply.demo.server import PgServer
from parapply.demo.stage import MAJOR

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parapply.demo.cluster import Setting

_RESULTS: Final = Path(__file__).parents[1] / "results"
_SETTINGS: Final[Mapping[str, Setting]] = {
    "autovacuum": False, "shared_buffers": "512MB", "max_wal_size": "16GB", "checkpoint_timeout": "1h",
    "wal_level": "logical", "synchronous_commit": "off",
}  # fmt: skip
_TABLES: Final = """
CREATE TABLE plain (id int8 PRIMARY KEY, n int4);
CREATE TABLE wide (id int4 PRIMARY KEY, n int4, payload text);
INSERT INTO wide SELECT i, 0, repeat('x', 400) FROM generate_series(0, 99999) AS i;
CREATE PUBLICATION decoded FOR ALL TABLES;
CREATE PROCEDURE plain(first int8, most int8) LANGUAGE plpgsql AS
  $$ BEGIN FOR i IN first .. most LOOP INSERT INTO plain VALUES (i, i); COMMIT; END LOOP; END $$;
CREATE PROCEDURE wide(first int8, most int8) LANGUAGE plpgsql AS
  $$ BEGIN
       FOR i IN first .. most LOOP UPDATE wide SET n = i WHERE id = i::int8 * 7919 % 100000; COMMIT; END LOOP;
     END $$;
"""
_CLIENTS: Final = 2
_OPTIONS: Final = ("--option=proto_version=1", "--option=publication_names=decoded", "--option=binary=true")


@click.command()
@click.option("--transactions", type=click.IntRange(min=1000), default=2_000_000, show_default=True)
@click.option("--points", type=click.IntRange(min=4), default=16, show_default=True, help="Restart points, evenly.")
@click.option("--readers", type=click.IntRange(min=2), multiple=True, default=(2, 4), show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--save/--no-save", "is_saved", default=True, help="Write the JSON file.")
def main(*, transactions: int, points: int, readers: tuple[int, ...], rounds: int, is_saved: bool) -> None:
    """Measure what several decoders cost a publisher."""
    machine = machine_facts(os.getloadavg()[0])
    figures = []
    for shape in ("plain", "wide"):
        with PgServer(binaries=find_binaries(MAJOR), name="decoders", settings=_SETTINGS) as server:
            server.execute(_TABLES)
            base = _Backlog(server, shape, transactions, points)
            turns: dict[int, list[dict[str, float]]] = {k: [] for k in (1, *readers)}
            for _ in range(rounds):
                for k, found in turns.items():
                    found.append(base.read(k))
        for k, found in turns.items():
            one: dict[str, Any] = {name: round(statistics.median(turn[name] for turn in found), 2) for name in found[0]}
            figures.append({"shape": shape, "readers": k, "wal_bytes": base.wal_bytes, **one})
            print(
                f"{shape:6} {k} readers: CPU {one['cpu_s']:6.2f} s, {one['advance_cpu_s']:5.2f} of it to advance; "
                f"{one['seconds']:6.2f} s"
            )
    if is_saved:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        document = {
            "machine": machine, "rounds": rounds, "transactions": transactions, "points": points, "figures": figures,
        }  # fmt: skip
        print(write_result(_RESULTS / f"decoders-{stamp}.json", document))


class _Backlog:
    """Transactions on the publisher, and the LSNs at which decoding can begin."""

    def __init__(self, server: PgServer, shape: str, transactions: int, points: int) -> None:
        """Write it."""
        self._server = server
        server.execute("SELECT pg_create_logical_replication_slot('base', 'pgoutput')")
        first = self._here()
        each = transactions // _CLIENTS
        self.points: list[str] = []
        with ThreadPoolExecutor(_CLIENTS) as pool, psycopg.connect(server.dsn(), autocommit=True) as connection:
            calls = [f"CALL {shape}({at * each}, {(at + 1) * each - 1})" for at in range(_CLIENTS)]
            writers = [pool.submit(self._write, call) for call in calls]
            while not all(writer.done() for writer in writers):
                ((written,),) = connection.execute(
                    "SELECT sum(xact_commit) FROM pg_stat_database WHERE datname = current_database()"
                ).fetchall()
                if written >= len(self.points) * transactions // points:
                    ((lsn,),) = connection.execute("SELECT pg_log_standby_snapshot()::text").fetchall()
                    self.points.append(lsn)
                time.sleep(0.05)
        for writer in writers:
            writer.result()
        ((last,),) = server.execute("SELECT pg_logical_emit_message(true, 'parapply bench', '')::text")
        self.end_lsn = str(last)
        ((wal_bytes,),) = server.execute(f"SELECT ('{last}'::pg_lsn - '{first}'::pg_lsn)::int8")
        self.wal_bytes = int(wal_bytes)

    def _here(self) -> str:
        ((lsn,),) = self._server.execute("SELECT pg_current_wal_insert_lsn()::text")
        return str(lsn)

    def _write(self, call: str) -> None:
        with psycopg.connect(self._server.dsn(), autocommit=True) as connection:
            connection.execute(call.encode())

    def read(self, k: int) -> dict[str, float]:
        """Have k readers read all of it, a range each, and return what that cost."""
        cuts = [self.points[len(self.points) * number // k] for number in range(1, k)]
        ranges = list(zip(["", *cuts], [*cuts, self.end_lsn], strict=True))
        before_s = server_cpu_s(self._server.pid)
        began_s = time.monotonic()
        for number, (begin, _) in enumerate(ranges):
            self._server.execute(f"SELECT pg_copy_logical_replication_slot('base', 'reader_{number}')")
            if begin:
                self._server.execute(f"SELECT pg_replication_slot_advance('reader_{number}', '{begin}')")
        advanced_s = server_cpu_s(self._server.pid)
        reading = [self._reader(number, end) for number, (_, end) in enumerate(ranges)]
        _wait(reading)
        seconds = time.monotonic() - began_s
        found = {
            "cpu_s": server_cpu_s(self._server.pid) - before_s, "advance_cpu_s": advanced_s - before_s,
            "seconds": seconds,
        }  # fmt: skip
        for number in range(k):
            self._server.execute(f"SELECT pg_drop_replication_slot('reader_{number}')")
        return found

    def _reader(self, number: int, end_lsn: str) -> subprocess.Popen[bytes]:
        words = [
            str(self._server.program("pg_recvlogical")), f"--dbname={self._server.dsn()}", f"--slot=reader_{number}",
            "--start", "--no-loop", "--file=/dev/null", f"--endpos={end_lsn}", *_OPTIONS,
        ]  # fmt: skip
        return subprocess.Popen(words, env=self._server.client_env(), stdin=subprocess.DEVNULL)


def _wait(reading: Sequence[subprocess.Popen[bytes]]) -> None:
    for one in reading:
        if code := one.wait():
            raise click.ClickException(f"pg_recvlogical ended with {code}")


if __name__ == "__main__":
    main()
