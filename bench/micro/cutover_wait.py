"""The longest wait of a client during a cut-over: `python -m bench.micro.cutover_wait SCALE RATE`.

In: the scale of pgbench's tables, 68 for about 1 GB, and transactions a second. pgbench writes through a PgBouncer
while the target takes over, and while the source does again. Out: one JSON line with milliseconds from a transaction's
scheduled begin to its end, the longest before the first cut-over and in each of the two, which includes no transaction
that failed, because any error ends the program.

Source: PostgreSQL manual, "pgbench", "Per-Transaction Logging".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from parapply.demo.binaries import find_binaries, find_program
from parapply.demo.server import PgServer
from tests.fixtures.databases import Database
from tests.fixtures.pgbench import LEDGER, PgBench
from tests.fixtures.pgbouncer import APP, PgBouncer, pgbouncer

if TYPE_CHECKING:
    from parapply.demo.cluster import Setting

_SETTINGS: Final[dict[str, Setting]] = {"wal_level": "logical", "shared_buffers": "512MB", "max_wal_size": "4GB"}
_BANK: Final = "bank"
_CLIENTS: Final = 8
_STEADY_S: Final = 20.0
_POLL_S: Final = 0.1
#: pgbench's TPC-B.
_STATEMENTS: Final = """
\\set aid random(1, 100000 * :scale)
\\set bid random(1, 1 * :scale)
\\set tid random(1, 10 * :scale)
\\set delta random(-5000, 5000)
UPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;
SELECT abalance FROM pgbench_accounts WHERE aid = :aid;
UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;
UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = :bid;
INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) VALUES (:tid, :bid, :aid, :delta, CURRENT_TIMESTAMP);
"""


def _parapply(*words: str) -> str:
    """Run a command to its end and return what it wrote.

    Raises:
        SystemExit: it failed; its output is the message.
    """
    command = [sys.executable, "-m", "parapply", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{words}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _daemon(path: Path, stack: ExitStack, publisher: PgServer) -> None:
    """Start the daemon of a file, and return once it reads its slot."""
    with path.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "parapply", "run", "--config", str(path)], stderr=log)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    while publisher.execute("SELECT count(*) FROM pg_replication_slots WHERE active") == [(0,)]:
        time.sleep(_POLL_S)


def _longest_ms(directory: Path, begin_s: float, end_s: float) -> float:
    """Return the longest of the transactions that ended between two times of the epoch, of all of pgbench's logs."""
    longest_us = 0
    for path in directory.glob("pgbench-*.[0-9]*"):
        for line in path.read_text(encoding="ascii").splitlines():
            _, _, elapsed_us, _, ended_s, ended_us, *_ = map(int, line.split())
            if begin_s <= ended_s + ended_us / 1e6 <= end_s:
                longest_us = max(longest_us, elapsed_us)
    return longest_us / 1000


def _cut_over(ahead: Path, back: Path, pooler: PgBouncer, *way: str) -> tuple[float, float]:
    """Cut over behind the pooler, and return the times of the epoch around it and the transactions that waited."""
    began_s = time.time()
    words = ("--pooler", pooler.console, "--pooler-config", str(pooler.ini), "--pooler-database", APP)
    _parapply("cutover", "--config", str(ahead), "--reverse", str(back), *words, *way)
    pooler.wait_for_transactions(200)
    return began_s, time.time()


def main(scale: int, rate: int) -> None:
    """Measure and print."""
    binaries = find_binaries()
    with ExitStack() as stack:
        source, target = (
            stack.enter_context(PgServer(binaries=binaries, settings=_SETTINGS, name=f"cutover-{name}"))
            for name in ("source", "target")
        )
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for server in (source, target):
            server.execute(f"CREATE DATABASE {_BANK}")
        source.run("pgbench", "--initialize", "--quiet", f"--scale={scale}", dbname=_BANK)
        source.execute(LEDGER, dbname=_BANK)
        source.execute("CREATE PUBLICATION pub FOR ALL TABLES", dbname=_BANK)
        ((size_bytes,),) = source.execute(f"SELECT pg_database_size('{_BANK}')")
        program = str(find_program("pg_dump", binaries))
        ahead, back = directory / "ahead.toml", directory / "back.toml"
        ahead.write_text(
            f'[source]\ndsn = "{source.dsn(_BANK)}"\nslot = "ahead"\npublications = ["pub"]\n'
            f'[target]\ndsn = "{target.dsn(_BANK)}"\n',
            encoding="utf-8",
        )
        _parapply("init", "--config", str(ahead), "--schema", "--copy", "--pg-dump", program)
        back.write_text(_parapply("cutover", "--config", str(ahead), "--print-reverse"), encoding="utf-8")
        _daemon(ahead, stack, source)
        role = source.execute("SELECT current_user")[0][0]
        pooler = stack.enter_context(pgbouncer(Database(dbname=_BANK, server=source), user=role))
        statements = _STATEMENTS.replace(":scale", str(scale))
        writer = PgBench(0, pooler.dsn(), statements, directory, clients=_CLIENTS, rate=rate)
        stack.callback(writer.kill)
        pooler.wait_for_transactions(200)
        steady_s = time.time()
        time.sleep(_STEADY_S)
        there = _cut_over(ahead, back, pooler)
        _daemon(back, stack, target)
        returned = _cut_over(ahead, back, pooler, "--back")
        _daemon(ahead, stack, source)
        pooler.wait_for_transactions(200)
        answered = writer.end()
        spans = {"steady": (steady_s, there[0]), "there": there, "back": returned}
        print(
            json.dumps(
                {
                    "database_bytes": size_bytes, "rate": rate, "transactions": answered.total(),
                    **{f"longest_{name}_ms": _longest_ms(directory, *span) for name, span in spans.items()},
                    "load": round(os.getloadavg()[0], 1),
                }
            )
        )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
