"""The workloads: which tables both servers hold, what writes to them, and what parapply is told for it.

In go a stage and sizes; afterwards both servers hold the same rows, or the publisher a backlog. A workload of our own
is two scripts in `scripts`: `NAME.schema.sql` for psql and `NAME.load.sql` for pgbench, one transaction a run.

Source: PostgreSQL manual, "pgbench" and "psql".
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from parapply.demo.errors import DemoError
from parapply.demo.race import make_backlog
from parapply.demo.stage import BANK, PUBLICATION

if TYPE_CHECKING:
    from parapply.demo.stage import Stage

_SCRIPTS = Path(__file__).parent / "scripts"
# Scale 100 takes about a minute on a slow machine.
_FILL_TIMEOUT_S = 900.0
_TAIL_LINES = 5
# The clients' dice fall the same way every time; how the clients take turns differs from run to run all the same.
_SEED: Final = 20261121


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tables and a load.

    Attributes:
        name: for the command line and for file names.
        text: what it is, for people.
        script: begins the names of its two scripts; empty for what pgbench has built in.
        state: variables that pgbench keeps for each client from run to run; they start as 0.
        settings: `key=value` for parapply, as for `--set`.
    """

    name: str
    text: str
    script: str = ""
    state: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def fill(self, stage: Stage, scale: int) -> None:
        """Make the same tables and rows on both servers, and publish them.

        Raises:
            DemoError: a server or a program failed.
        """
        if not self.script:
            stage.fill_bank(scale)
            return
        schema = str(_SCRIPTS / f"{self.script}.schema.sql")
        options = ["--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--set=scale={scale}", f"--file={schema}"]
        for server in (stage.source, stage.target):
            server.execute(f"CREATE DATABASE {BANK}")
            server.run("psql", *options, dbname=BANK, timeout_s=_FILL_TIMEOUT_S)
            # The marks that tell when a runner has begun and when it is done, as `Stage.fill_bank` makes them.
            server.execute("CREATE TABLE race_line (position int PRIMARY KEY, label text NOT NULL)", dbname=BANK)
        stage.source.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES", dbname=BANK)

    def load(self, stage: Stage, *, scale: int, clients: int, each: int) -> int:
        """Commit transactions on the publisher between two marked rows, and return how many.

        Args:
            stage: filled.
            scale: as it was filled with.
            clients: pgbench clients.
            each: transactions of each client; every one changes rows.

        Raises:
            DemoError: pgbench or the server failed.
        """
        if not self.script:
            return make_backlog(stage, clients=clients, limit=f"--transactions={each}")
        stage.source.execute("INSERT INTO race_line VALUES (1, 'first')", dbname=BANK)
        _run_pgbench(stage, self, scale=scale, clients=clients, each=each)
        stage.source.execute("INSERT INTO race_line VALUES (2, 'last')", dbname=BANK)
        return clients * each


def _run_pgbench(stage: Stage, workload: Workload, *, scale: int, clients: int, each: int) -> None:
    log = stage.directory / f"pgbench-{workload.script}.log"
    # The publisher's own commits are not what is measured.
    env = {**stage.source.client_env(BANK), "PGOPTIONS": "-c synchronous_commit=off"}
    variables = {"scale": scale, "clients": clients, **dict.fromkeys(workload.state, 0)}
    command = [
        str(stage.source.program("pgbench")), "--no-vacuum", "--protocol=prepared", f"--random-seed={_SEED}",
        f"--client={clients}", f"--jobs={min(clients, os.cpu_count() or 1)}", f"--transactions={each}",
        *[f"--define={name}={value}" for name, value in variables.items()],
        f"--file={_SCRIPTS / workload.script}.load.sql",
    ]  # fmt: skip
    # Not `PgServer.run`: the stage ends what it has started when we are interrupted.
    if code := stage.start(command, env=env, output=log).wait():
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
        raise DemoError(f"pgbench ended with {code}: {tail}")


_FOREIGN_KEYS_STATE = ("serial", "newcomer", "newcomer_before", "first_order", "latest_order", "archived")

WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload(name="simple-update", text="pgbench simple-update"),
        Workload(
            name="unique-keys",
            text="accounts with two more unique indexes; one transaction in a hundred frees a value for another row",
            script="unique-keys",
            state=("serial", "freed", "taken"),
        ),
        Workload(
            name="foreign-keys",
            text="customers, orders and lines; parapply enforces the foreign keys, the built-in one never does",
            script="foreign-keys",
            state=_FOREIGN_KEYS_STATE,
            settings=("target.session_replication_role=origin",),
        ),
        Workload(
            name="foreign-keys-replica",
            text="customers, orders and lines; nobody enforces the foreign keys",
            script="foreign-keys",
            state=_FOREIGN_KEYS_STATE,
            settings=("target.session_replication_role=replica",),
        ),
    )
}
