"""Memory and CPU of idle databases: `python -m bench.micro.idle_fleet DATABASES TABLES SECONDS [SETTLES]`.

In: two servers of the newest version that is found. Out: one JSON line with resident bytes, part of a core, sessions on
the target, and the seconds until every slot was served.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from parapply.config_fleet import slot_name
from parapply.demo.binaries import find_binaries
from parapply.demo.server import PgServer

if TYPE_CHECKING:
    from parapply.demo.cluster import Setting

_SETTINGS: Final[dict[str, Setting]] = {
    "fsync": "off", "max_connections": 800, "max_wal_senders": 200, "max_replication_slots": 400,
    "max_active_replication_origins": 400, "shared_buffers": "64MB",
}  # fmt: skip
_TICKS_S: Final = os.sysconf("SC_CLK_TCK")


def _tables(n_tables: int) -> str:
    return "".join([f"CREATE TABLE t{n} (id int PRIMARY KEY, v text);" for n in range(n_tables)])


def _make(source: PgServer, target: PgServer, name: str, n_tables: int) -> None:
    for server in (source, target):
        server.execute(f"CREATE DATABASE {name}")
        server.execute(_tables(n_tables), dbname=name)
    source.execute("CREATE PUBLICATION pub FOR ALL TABLES", dbname=name)
    source.execute(f"SELECT pg_create_logical_replication_slot('{slot_name('idle', name)}', 'pgoutput')", dbname=name)
    source.execute("".join([f"INSERT INTO t{n} VALUES (1, 'x');" for n in range(n_tables)]), dbname=name)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


def _resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _wait(target: PgServer, names: list[str], n_tables: int) -> None:
    """Return once every database has the rows that were written before."""
    query = " + ".join([f"(SELECT count(*) FROM t{n})" for n in range(n_tables)])
    for name in names:
        while target.execute(f"SELECT {query}", dbname=name)[0][0] < n_tables:
            time.sleep(0.2)


def main(n_databases: int, n_tables: int, duration_s: float, settles_s: float = 15.0) -> None:
    """Measure and print."""
    names = [f"db{n}" for n in range(n_databases)]
    binaries = find_binaries()
    with (
        PgServer(binaries=binaries, settings={**_SETTINGS, "wal_level": "logical"}, name="idle-source") as source,
        PgServer(binaries=binaries, settings=_SETTINGS, name="idle-target") as target,
        tempfile.TemporaryDirectory() as directory,
    ):
        for name in names:
            _make(source, target, name, n_tables)
        path = Path(directory) / "fleet.toml"
        path.write_text(
            f"databases = {json.dumps(names)}\n"
            f'[source]\ndsn = "{source.dsn("postgres")}"\nslot = "idle"\npublications = ["pub"]\n'
            f'[target]\ndsn = "{target.dsn("postgres")}"\n',
            encoding="utf-8",
        )
        began_s = time.monotonic()
        with (Path(directory) / "log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-m", "parapply", "run", "--config", str(path)], stderr=log)
        try:
            _wait(target, names, n_tables)
            ready_s = time.monotonic() - began_s
            time.sleep(settles_s)
            before_s, at_s = _cpu_s(process.pid), time.monotonic()
            time.sleep(duration_s)
            cpu = (_cpu_s(process.pid) - before_s) / (time.monotonic() - at_s)
            query = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'parapply %'"
            result = {
                "databases": n_databases, "tables": n_tables, "ready_s": round(ready_s, 1),
                "resident_bytes": _resident_bytes(process.pid), "cores": round(cpu, 4),
                "sessions": target.execute(query)[0][0], "load": round(os.getloadavg()[0], 1),
            }  # fmt: skip
            print(json.dumps(result))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))
