"""`python -m bench.micro.metrics`: what counting, and a Prometheus that scrapes once a second, cost the leader.

One backlog is drained with the endpoint off and on in turn, merged into large batches and with every source transaction
a target transaction of its own, where there is most to count. Beside it the parts alone: one batch counted, one scrape.
"""

from __future__ import annotations

import os
import socket
import threading
import urllib.request
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import TYPE_CHECKING, Final, Self

import click

from bench.catchup import prepare
from bench.compare import is_equal
from bench.observe import LEADER_STREAM, Observer
from bench.options import Options
from bench.output import write_result
from bench.report import machine_facts
from bench.servers import make_stage, versions
from bench.workloads import LARGE_ROWS, WORKLOADS
from parapply.applylog_schema import RowCounts
from parapply.demo.interrupts import Interrupts
from parapply.demo.race import drain_with_parapply, drop_target, make_target
from parapply.demo.stage import BANK
from parapply.engine.job import SetJob
from parapply.metrics.exposition import exposition
from parapply.metrics.figures import Figures
from parapply.plan.batch import Batch
from parapply.runtime.observe.meter import count

if TYPE_CHECKING:
    from parapply.demo.stage import Stage

_RESULTS: Final = Path(__file__).parents[1] / "results"
_SLOT: Final = "backlog"
_TURN: Final = "turn"
_SCRAPE_S: Final = 1.0
_CALLS: Final = 10_000
#: Settings by how the backlog is applied.
_SHAPES: Final = {"merged": (), "single": ("apply.max_batch_transactions=1",)}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One drained backlog: seconds until the last row was visible, the leader's CPU in seconds, and scrapes."""

    total_s: float
    leader_cpu_s: float
    scrapes: int


class _Scraper:
    """A Prometheus that is in a hurry; as a context manager it starts and ends."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper")
        self.scrapes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                with urllib.request.urlopen(self._url, timeout=5) as answer:
                    answer.read()
                self.scrapes += 1
            except OSError:
                # Not there yet, or no more.
                self._is_over.wait(0.05)
                continue
            self._is_over.wait(_SCRAPE_S)


def _drain(stage: Stage, shape: str, *, is_scraped: bool) -> Turn:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stage.source.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [_SLOT, _TURN], dbname=BANK)
    make_target(stage, _TURN)
    listen = [f"metrics.listen=127.0.0.1:{port}"] if is_scraped else []
    scraper = _Scraper(port)
    with Observer(stage, _TURN) as observer:
        if is_scraped:
            scraper.__enter__()
        try:
            drained = drain_with_parapply(
                stage, slot=_TURN, dbname=_TURN, settings=[*_SHAPES[shape], *listen], watch=observer
            )
        finally:
            if is_scraped:
                scraper.__exit__()
        usage = observer.usage()[LEADER_STREAM]
    if not is_equal(stage, _TURN):
        raise click.ClickException("the tables differ")
    drop_target(stage, _TURN)
    return Turn(total_s=drained.total_s, leader_cpu_s=usage.cpu_s, scrapes=scraper.scrapes)


def _parts() -> dict[str, float]:
    """Return seconds for one batch of two tables counted, and for one scrape with 20 and 1,000 tables."""
    job = SetJob(Batch(1, 1), {})
    job.counts.rows = {f"public.t{number}": RowCounts(insert=1) for number in range(2)}
    job.counts.n_transactions, job.counts.n_changes, job.counts.size_bytes = 1, 2, 300
    figures = Figures()
    found = {"count_batch_s": min(repeat(lambda: count(figures, job), number=_CALLS)) / _CALLS}
    for n_tables in (20, 1000):
        figures = Figures()
        for number in range(n_tables):
            figures.table(f"public.table_{number}").waits["key"] += 1
        values = min(repeat(lambda: exposition("app", figures.values(), figures.histograms()), number=20)) / 20  # noqa: B023
        found[f"scrape_{n_tables}_tables_s"] = values
    return found


@click.command()
@click.option("--transactions", type=click.IntRange(min=1), default=50_000, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--shape", "shapes", type=click.Choice(list(_SHAPES)), multiple=True, default=tuple(_SHAPES))
def main(transactions: int, rounds: int, shapes: tuple[str, ...]) -> None:
    """Drain a backlog with and without the endpoint."""
    options = Options(transactions=transactions, large_rows=LARGE_ROWS)
    turns: dict[str, list[Turn]] = defaultdict(list)
    machine = machine_facts(os.getloadavg()[0])
    parts = _parts()
    click.echo(", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in parts.items()))
    with Interrupts() as interrupts, make_stage(interrupts, options) as stage:
        facts = {**machine, **versions(stage)}
        backlog = prepare(stage, WORKLOADS["simple-update"], options)
        for number in range(rounds):
            for shape in shapes:
                # Each round begins with the other one.
                for is_scraped in (bool(number % 2), not number % 2):
                    turn = _drain(stage, shape, is_scraped=is_scraped)
                    turns[f"{shape} {'scraped' if is_scraped else 'off'}"].append(turn)
                    click.echo(f"{shape} {'scraped' if is_scraped else 'off':8} {turn}")
    figures = {
        name: {
            "median_s": median(turn.total_s for turn in found),
            "leader_cpu_s": median(turn.leader_cpu_s for turn in found),
            "turns": [asdict(turn) for turn in found],
        }
        for name, found in sorted(turns.items())
    }
    for name, found in figures.items():
        click.echo(f"{name:16} median {found['median_s']:.2f} s, leader {found['leader_cpu_s']:.2f} s of CPU")
    content = {"backlog": asdict(backlog), "facts": facts, "parts": parts, **figures}
    path = write_result(_RESULTS / f"metrics-cost-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json", content)
    click.echo(f"written: bench/{_RESULTS.name}/{path.name}")


if __name__ == "__main__":
    main()
