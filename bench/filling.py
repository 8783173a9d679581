"""Makes the tables of a workload on both servers, and its backlog on the publisher.

In go a stage, a workload and sizes; afterwards both servers hold the same rows, or the publisher a backlog between two
marked rows.

Source: PostgreSQL manual, "pgbench", "psql" and "The Cumulative Statistics System".
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from parapply.demo.errors import DemoError
from parapply.demo.race import make_backlog, mark_first, mark_last
from parapply.demo.stage import BANK, PUBLICATION

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence

    from bench.options import Options
    from bench.workloads import Workload
    from parapply.demo.stage import Stage

_SCRIPTS = Path(__file__).parent / "scripts"
_PSQL: Final = ("--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1")
# Scale 100 takes about a minute on a slow machine.
_FILL_TIMEOUT_S = 900.0
_TAIL_LINES = 5
# The clients' dice fall the same way every time; how the clients take turns differs from run to run all the same.
_SEED: Final = 20261121
# A client has told the server that it leaves before the server has counted what it did; that takes milliseconds.
_LEAVE_TIMEOUT_S = 30.0
_LEAVE_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """Work to drain, without the two marks.

    Attributes:
        transactions: on the publisher.
        changes: rows inserted, updated and deleted by them.
        end_lsn: after the mark at the end.
    """

    transactions: int
    changes: int
    end_lsn: str


def fill(stage: Stage, workload: Workload, *, scale: int) -> None:
    """Make the same tables and rows on both servers, and publish them.

    Raises:
        DemoError: a server or a program failed.
    """
    if workload.builtin:
        stage.fill_bank(scale)
        return
    words = _psql_words(f"{workload.stem}.schema", {"scale": scale, **workload.constants})
    for server in (stage.source, stage.target):
        server.execute(f"CREATE DATABASE {BANK}")
        server.run("psql", *words, dbname=BANK, timeout_s=_FILL_TIMEOUT_S)
        # The marks that show when a runner has begun and when it is done, as `Stage.fill_bank` makes them.
        server.execute("CREATE TABLE race_line (position int PRIMARY KEY, label text NOT NULL)", dbname=BANK)
    stage.source.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES {workload.publication}", dbname=BANK)


def load(stage: Stage, workload: Workload, options: Options) -> Backlog:
    """Commit transactions on the publisher between two marked rows, and return what they are.

    Args:
        stage: filled.
        workload: what it was filled for.
        options: how much; the scale as it was filled with.

    Raises:
        DemoError: a program or the server failed.
    """
    before = _changes(stage)
    if workload.builtin:
        limit = f"--transactions={_each(workload, options)}"
        committed = make_backlog(stage, clients=options.clients, limit=limit, script=workload.builtin)
    else:
        mark_first(stage)
        committed = _run_scripts(stage, workload, options)
        mark_last(stage)
    ((end_lsn,),) = stage.source.execute("SELECT pg_current_wal_insert_lsn()")
    # The two marks are rows as well.
    return Backlog(transactions=committed, changes=_changes(stage) - before - 2, end_lsn=str(end_lsn))


def _each(workload: Workload, options: Options) -> int:
    """Return the transactions of one client."""
    return math.ceil(options.backlog(workload.transactions) / options.clients)


def _run_scripts(stage: Stage, workload: Workload, options: Options) -> int:
    """Run the load and what runs alongside it, and return the transactions committed."""
    if workload.psql_transactions:
        rows = options.backlog(workload.transactions)
        _start_psql(stage, f"{workload.stem}.load", scale=options.scale, rows=rows).wait()
        return workload.psql_transactions
    beside: list[_Program] = []
    if workload.has_beside:
        beside.append(_start_psql(stage, f"{workload.stem}.beside", scale=options.scale, rows=options.large()))
    _start_pgbench(stage, workload, options).wait()
    for one in beside:
        one.wait()
    return options.clients * _each(workload, options) + len(beside)


class _Program:
    """A client program on the publisher. Not `PgServer.run`: the stage ends what it has started when we are stopped."""

    def __init__(self, stage: Stage, name: str, script: str, arguments: Sequence[str]) -> None:
        """Start it; what it prints goes to a log that the script names."""
        self._name = name
        self._log = stage.directory / f"{name}-{script}.log"
        # The publisher's own commits are not what is measured.
        env = {**stage.source.client_env(BANK), "PGOPTIONS": "-c synchronous_commit=off"}
        command = [str(stage.source.program(name)), *arguments]
        self._process: subprocess.Popen[bytes] = stage.start(command, env=env, output=self._log)

    def wait(self) -> None:
        """Return when it has ended.

        Raises:
            DemoError: it failed; the message holds the end of what it printed.
        """
        if code := self._process.wait():
            tail = "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
            raise DemoError(f"{self._name} ended with {code}: {tail}")


def _start_psql(stage: Stage, script: str, **variables: int) -> _Program:
    return _Program(stage, "psql", script, _psql_words(script, variables))


def _psql_words(script: str, variables: Mapping[str, int]) -> list[str]:
    return [*_PSQL, *[f"--set={name}={value}" for name, value in variables.items()], f"--file={_SCRIPTS / script}.sql"]


def _start_pgbench(stage: Stage, workload: Workload, options: Options) -> _Program:
    clients, each = options.clients, _each(workload, options)
    variables = {"scale": options.scale, "clients": clients, **workload.constants, **dict.fromkeys(workload.state, 0)}
    arguments = [
        "--no-vacuum", "--protocol=prepared", f"--random-seed={_SEED}",
        f"--client={clients}", f"--jobs={min(clients, os.cpu_count() or 1)}", f"--transactions={each}",
        *[f"--define={name}={value}" for name, value in variables.items()],
        f"--file={_SCRIPTS / workload.stem}.load.sql",
    ]  # fmt: skip
    return _Program(stage, "pgbench", workload.stem, arguments)


def _changes(stage: Stage) -> int:
    """Return the rows inserted, updated and deleted in user tables since the database was made.

    A session's last figures are in when it is gone, so all others must be.

    Raises:
        DemoError: another session stays connected.
    """
    others = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend'"
    )
    deadline_s = time.monotonic() + _LEAVE_TIMEOUT_S
    while stage.source.execute(others, dbname=BANK) != [(0,)]:
        if time.monotonic() > deadline_s:
            raise DemoError("A session on the publisher does not end, so that its changes cannot be counted.")
        time.sleep(_LEAVE_POLL_S)
    query = "SELECT coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0) FROM pg_stat_user_tables"
    ((changes,),) = stage.source.execute(query, dbname=BANK)
    return int(changes)
