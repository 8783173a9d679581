"""The demonstration: two servers, a load, the daemon, a proof that both sides are equal, and a race.

In go the options of `parapply demo`; out comes an exit code. Nothing is left behind, unless it was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from parapply import WHY_INTERPRETED
from parapply.demo.command import Parapply
from parapply.demo.load import DemoLoad
from parapply.demo.race import (
    create_slot,
    drain_with_parapply,
    drain_with_subscription,
    drop_target,
    make_backlog,
    make_target,
    verify_target,
)
from parapply.demo.show import View, show_applylog, show_comparison, show_how_to_go_on, show_progress, show_race
from parapply.demo.stage import BANK, Interrupts, Stage

if TYPE_CHECKING:
    from parapply.demo.command import Comparison
    from parapply.demo.race import Drained

_SLOT = "demo"
_RACE_PARAPPLY, _RACE_BUILT_IN, _RACE_VERIFY = "race_parapply", "race_built_in", "race_verify"
# A time, not a number: the backlog suits the machine. Long enough that the start of a process, which counts, does not
# decide. At most the time of the load before it: a demonstration that was asked to be short is short.
_RACE_LOAD_S = 20
# The rest when the load ends is a few seconds' work; ten times that is a fault.
_WAIT_S = 60
_NOT_EQUAL = 1


def main(*, duration_s: int, clients: int, workers: int, scale: int, keep: bool) -> int:
    """Show everything and return the exit code: 0 if every comparison was equal, else 1.

    Raise KeyboardInterrupt after Ctrl-C, SystemExit after SIGTERM or SIGHUP; all is cleaned up.
    """
    console = Console(highlight=False)
    with Interrupts() as interrupts, Stage(interrupts, name="demo") as stage:
        demo = Demo(stage, console, workers=workers)
        demo.prepare(scale)
        is_equal = demo.follow(duration_s, clients)
        is_equal = demo.race(min(duration_s, _RACE_LOAD_S), clients) and is_equal
        verdict = "Every comparison was equal." if is_equal else "NOT EQUAL: see the tables above."
        console.print(f"\n[bold]{verdict}[/bold]")
        if keep:
            demo.keep()
        else:
            console.print("Cleaning up; --keep would leave all of it running.")
    return 0 if is_equal else _NOT_EQUAL


class Demo:
    """The acts, in their order."""

    def __init__(self, stage: Stage, console: Console, *, workers: int) -> None:
        self._stage = stage
        self._console = console
        self._n_workers = workers
        self._applylog = stage.directory / "applylog"
        self._applylog.mkdir()
        settings = [f"apply.workers={workers}", f"applylog.directory={self._applylog}"]
        self._daemon = Parapply(stage, slot=_SLOT, settings=settings)

    def prepare(self, scale: int) -> None:
        """Fill both servers alike and make slot and state."""
        for role, server in (("publisher", self._stage.source), ("subscriber", self._stage.target)):
            self._say(f"{role}: PostgreSQL {server.binaries.version_text} on 127.0.0.1, port {server.port}")
        if WHY_INTERPRETED:
            self._say(
                f"parapply's hot path runs interpreted here ({WHY_INTERPRETED}), so it is slower than it could be; with"
                " Cython and a C compiler it is compiled when parapply is installed."
            )
        self._stage.fill_bank(scale)
        self._say(f"both hold the same pgbench bank of {scale * 100_000:,} accounts")
        self._heading("parapply init")
        self._say(self._daemon.call("init").rstrip())

    def follow(self, duration_s: int, clients: int) -> bool:
        """Run load and daemon, wait for the daemon, compare, and return whether all is equal."""
        self._heading(f"Load: {clients} pgbench clients for {duration_s} s, {self._n_workers} workers follow")
        self._daemon.start()
        load = DemoLoad(self._stage, "tpcb-like", clients=clients, limit=f"--time={duration_s}")

        def goes_on() -> bool:
            self._daemon.check()
            return load.is_running()

        View(self._stage, _SLOT, self._console).follow(goes_on)
        ((end_lsn, transactions),) = self._stage.source.execute(
            "SELECT pg_current_wal_insert_lsn(), (SELECT count(*) FROM pgbench_history)", dbname=BANK
        )
        self._say(f"The load is over: {transactions:,} transactions. `parapply wait --lsn {end_lsn}` ...")
        self._daemon.call("wait", "--lsn", end_lsn, "--timeout", str(_WAIT_S))
        self._say("The subscriber has all of it.")
        self._heading("Proof: parapply verify, every published table on both sides")
        tables = self._daemon.verify()
        show_comparison(self._console, tables)
        self._daemon.stop()
        self._say("The daemon was asked to stop, and did.")
        self._heading("The daemon's records")
        show_progress(self._console, self._stage, _SLOT)
        show_applylog(self._console, self._applylog, self._daemon.log)
        return all(table.is_equal for table in tables)

    def race(self, load_s: int, clients: int) -> bool:
        """Load a backlog for some seconds, have it drained twice, show the times, and return whether all is equal."""
        self._heading("Race: the same backlog, drained by one runner after the other")
        for slot in (_RACE_BUILT_IN, _RACE_PARAPPLY):
            create_slot(self._stage, slot)
            make_target(self._stage, slot)
        self._say(f"Each has a slot and a copy of the bank; {clients} clients load for {load_s} s ...")
        transactions = make_backlog(self._stage, clients=clients, limit=f"--time={load_s}")
        self._say(f"The backlog is {transactions:,} transactions. First the built-in subscription ...")
        built_in = drain_with_subscription(self._stage, slot=_RACE_BUILT_IN, dbname=_RACE_BUILT_IN)
        self._say("... then parapply.")
        settings = [f"apply.workers={self._n_workers}"]
        verified: list[Comparison] = []
        ours = drain_with_parapply(
            self._stage, slot=_RACE_PARAPPLY, dbname=_RACE_PARAPPLY, settings=settings,
            then=lambda daemon: verified.extend(daemon.verify()),
        )  # fmt: skip
        names = ("built-in subscription", f"parapply, {self._n_workers} workers")
        runners: dict[str, Drained] = dict(zip(names, (built_in, ours), strict=True))
        of_built_in = verify_target(self._stage, slot=_RACE_VERIFY, dbname=_RACE_BUILT_IN)
        tables = dict(zip(names, (of_built_in, verified), strict=True))
        show_race(self._console, runners, tables, transactions)
        for slot in (_RACE_BUILT_IN, _RACE_PARAPPLY):
            drop_target(self._stage, slot)
        return all(table.is_equal for every in tables.values() for table in every)

    def keep(self) -> None:
        """Start the daemon again, let it catch up, leave everything running, and say what can be done with it."""
        self._daemon.start()
        ((lsn,),) = self._stage.source.execute("SELECT pg_current_wal_insert_lsn()", dbname=BANK)
        # The race's backlog is also in this slot. The servers are left idle, with a daemon that is known to run.
        self._daemon.call("wait", "--lsn", lsn, "--timeout", str(_WAIT_S))
        self._daemon.check()
        self._stage.keep()
        self._heading("Left running")
        show_how_to_go_on(self._console, self._stage, self._daemon, self._applylog)

    def _heading(self, text: str) -> None:
        self._console.print(f"\n[bold]{text}[/bold]")

    def _say(self, text: str) -> None:
        # The output of programs may look like markup.
        self._console.print(text, markup=False, soft_wrap=True)
