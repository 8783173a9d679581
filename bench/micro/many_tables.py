"""`python -m bench.micro.many_tables`: what tables cost a daemon that has little to apply: start, memory, rest.

In go numbers of tables; a tenth of them have two partitions, half of them a foreign key, all of them two indexes. For
each number two servers are filled and a daemon starts with a change of the first table and of the last one at hand. Out
come seconds and CPU until these are visible and until the daemon has nothing to do any more, its memory, and the CPU of
daemon and servers while nothing happens: before a table was announced, after each one was, and with a Prometheus that
scrapes, `status` and `top`. CPU says what is meant where the machine has other work; seconds do not.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import psutil

from bench.output import write_result
from bench.processes import peak_bytes, server_cpu_s
from bench.report import machine_facts
from parapply.demo.command import Parapply
from parapply.demo.race import mark_first, mark_last, measure
from parapply.demo.stage import BANK, PUBLICATION, Interrupts, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from parapply.demo.cluster import Setting

_RESULTS: Final = Path(__file__).parents[1] / "results"
_SLOT: Final = "many"
_SETTINGS: Final[Mapping[str, Setting]] = {"autovacuum": False, "synchronous_commit": "off", "max_wal_size": "16GB"}
#: Made so many at a time: each holds locks until the end of its transaction.
_MAKE: Final = """
DO $$
DECLARE n int; part int;
BEGIN
    FOR n IN 1..{n_tables} LOOP
        EXECUTE format('CREATE TABLE many_%s (id bigint PRIMARY KEY, other_id bigint, name text NOT NULL,'
            ' made_at timestamptz NOT NULL DEFAULT now(), amount numeric(12, 2)) %s', n,
            CASE WHEN n % 10 = 0 THEN 'PARTITION BY HASH (id)' ELSE '' END);
        IF n % 10 = 0 THEN
            FOR part IN 0..1 LOOP
                EXECUTE format('CREATE TABLE many_%s_%s PARTITION OF many_%1$s'
                    ' FOR VALUES WITH (MODULUS 2, REMAINDER %2$s)', n, part);
            END LOOP;
        END IF;
        EXECUTE format('CREATE {unique} INDEX ON many_%s (name, id)', n);
        IF n % 2 = 0 THEN
            EXECUTE format('ALTER TABLE many_%s ADD FOREIGN KEY (other_id) REFERENCES many_%s', n, n - 1);
        END IF;
        IF n % 50 = 0 THEN COMMIT; END IF;
    END LOOP;
END $$
"""
_TOUCH: Final = """
DO $$
BEGIN
    FOR n IN {first}..{last} LOOP
        EXECUTE format('INSERT INTO many_%s (id, name) VALUES ({number}, ''a'')', n);
        IF n % 50 = 0 THEN COMMIT; END IF;
    END LOOP;
END $$
"""
#: Seconds between two looks at the CPU used, and the part of a core below which a daemon is at rest.
_LOOK_S: Final = 1.0
_AT_REST: Final = 0.05
#: Looks in a row that must say so.
_LOOKS: Final = 4
_SETTLE_S: Final = 90.0
_MEGA: Final = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """Seconds, and seconds of CPU of the daemon, of all processes of the publisher, and of the target."""

    s: float
    daemon_s: float
    publisher_s: float
    target_s: float

    def text(self) -> str:
        """Return it for people."""
        return (
            f"{self.s:6.1f} s; CPU: daemon {self.daemon_s:.2f}, publisher {self.publisher_s:.2f},"
            f" target {self.target_s:.2f} s"
        )


class _Meter:
    """Usage of daemon and servers since some moment."""

    def __init__(self, stage: Stage, runner: Parapply) -> None:
        self._stage = stage
        self._runner = runner
        self._last = self._now()

    def _now(self) -> Cpu:
        pid = self._runner.pid
        times = psutil.Process(pid).cpu_times() if pid else None
        return Cpu(
            s=time.monotonic(),
            daemon_s=times.user + times.system if times else 0.0,
            publisher_s=server_cpu_s(self._stage.source.pid),
            target_s=server_cpu_s(self._stage.target.pid),
        )

    def lap(self) -> Cpu:
        """Return what was used since the last lap."""
        before, self._last = self._last, self._now()
        names = asdict(before)
        return Cpu(**{name: round(value - names[name], 3) for name, value in asdict(self._last).items()})

    def rest(self) -> Cpu:
        """Wait until the daemon is at rest, but not for ever, and return what was used until then."""
        end_s = time.monotonic() + _SETTLE_S
        n_looks, seen = 0, self._now()
        while n_looks < _LOOKS and time.monotonic() < end_s:
            self._runner.check()
            time.sleep(_LOOK_S)
            now = self._now()
            share = (now.daemon_s - seen.daemon_s + now.target_s - seen.target_s) / (now.s - seen.s)
            n_looks, seen = (n_looks + 1 if share < _AT_REST else 0), now
        return self.lap()


def _measure(n_tables: int, rest_s: float, *, is_copied: bool) -> dict[str, Any]:
    with Interrupts() as interrupts, Stage(interrupts, name="tables", settings=_SETTINGS) as stage:
        _fill(stage, n_tables)
        return _turn(stage, n_tables, rest_s, is_copied=is_copied)


def _turn(stage: Stage, n_tables: int, rest_s: float, *, is_copied: bool) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    runner = Parapply(stage, slot=_SLOT, settings=[f"metrics.listen=127.0.0.1:{port}"])
    began_s = time.monotonic()
    runner.call("init", *(["--copy"] if is_copied else []))
    figures: dict[str, Any] = {"tables": n_tables, "init_s": round(time.monotonic() - began_s, 2)}
    mark_first(stage)
    for number in (1, n_tables):
        _touch(stage, number, number, 1)
    mark_last(stage)
    found: dict[str, Cpu] = {}
    meter = _Meter(stage, runner)

    def take(part: str, cpu: Cpu) -> None:
        found[part] = cpu
        click.echo(f"{n_tables:>7,} tables  {part:28} {cpu.text()}")

    first_s, follows_s = measure(stage, BANK, runner.start, runner.check)
    figures |= {"first_row_s": round(first_s, 2), "follows_s": round(follows_s, 2)}
    take("until it follows", meter.lap())
    take("until it rests", meter.rest())
    figures["resident_mb"] = _resident_mb(runner)
    take("rest", _over(meter, rest_s))
    _touch(stage, 1, n_tables, 2)
    runner.call("wait", "--lsn", _lsn(stage), "--timeout", "600")
    take("a row in each table", meter.lap())
    take("until it rests again", meter.rest())
    figures["resident_with_each_mb"] = _resident_mb(runner)
    take("rest, each table announced", _over(meter, rest_s))
    take("rest, a scrape a second", _over(meter, rest_s, lambda: _scrape(port)))
    figures["scrape_bytes"] = _scrape(port)
    for command in (("status",), ("status", "--json"), ("top", "--once")):
        before_s = time.monotonic()
        used = psutil.Process().cpu_times()
        runner.call(*command)
        now = psutil.Process().cpu_times()
        used_s = now.children_user + now.children_system - used.children_user - used.children_system
        figures["_".join(command)] = {"s": round(time.monotonic() - before_s, 2), "cpu_s": round(used_s, 2)}
        take(" ".join(command), meter.lap())
    figures["log_bytes"] = runner.log.stat().st_size
    figures["peak_mb"] = round(peak_bytes(runner.pid or 0) / _MEGA, 1)
    runner.stop()
    return {**figures, "parts": {part: asdict(cpu) for part, cpu in found.items()}}


def _over(meter: _Meter, rest_s: float, then: Callable[[], object] | None = None) -> Cpu:
    """Return what is used in some seconds, with something done once a second."""
    meter.lap()
    for _ in range(round(rest_s)):
        time.sleep(1.0)
        if then:
            then()
    return meter.lap()


def _fill(stage: Stage, n_tables: int) -> None:
    for server, unique in ((stage.source, ""), (stage.target, "UNIQUE")):
        server.execute(f"CREATE DATABASE {BANK}")
        server.execute("CREATE TABLE race_line (position int PRIMARY KEY, label text NOT NULL)", dbname=BANK)
        server.execute(_MAKE.format(n_tables=n_tables, unique=unique), dbname=BANK)
        server.execute("VACUUM ANALYZE", dbname=BANK)
    stage.source.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES", dbname=BANK)


def _touch(stage: Stage, first: int, last: int, number: int) -> None:
    """Insert a row into each of some tables."""
    stage.source.execute(_TOUCH.format(first=first, last=last, number=number), dbname=BANK)


def _lsn(stage: Stage) -> str:
    ((lsn,),) = stage.source.execute("SELECT pg_current_wal_insert_lsn()", dbname=BANK)
    return str(lsn)


def _scrape(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return len(answer.read())


def _resident_mb(runner: Parapply) -> float:
    resident_bytes: int = psutil.Process(runner.pid).memory_info().rss
    return round(resident_bytes / _MEGA, 1)


@click.command()
@click.option("--tables", "sizes", type=click.IntRange(min=2), multiple=True, default=(10, 10_000), show_default=True)
@click.option("--rest-s", type=click.FloatRange(min=1), default=30.0, show_default=True, help="Of each look at rest.")
@click.option("--copy/--no-copy", "is_copied", default=True, show_default=True, help="Each table has a copy's record.")
@click.option("--save", "is_saved", is_flag=True, help="Write bench/results/many-tables-TIME.json.")
def main(sizes: tuple[int, ...], rest_s: float, *, is_copied: bool, is_saved: bool) -> None:
    """Measure with each number of tables."""
    machine = machine_facts(os.getloadavg()[0])
    figures = [_measure(n_tables, rest_s, is_copied=is_copied) for n_tables in sizes]
    least, most = figures[0], figures[-1]
    if most["tables"] > least["tables"]:
        n_more = most["tables"] - least["tables"]
        for name in ("resident_mb", "resident_with_each_mb", "peak_mb"):
            most[f"{name}_kb_a_table"] = round((most[name] - least[name]) * 1024 / n_more, 1)
    for figure in figures:
        click.echo(json.dumps({name: value for name, value in figure.items() if name != "parts"}, indent=2))
    if is_saved:
        document = {"machine": {**machine, "load_after": os.getloadavg()[0]}, "rest_s": rest_s, "figures": figures}
        click.echo(write_result(_RESULTS / f"many-tables-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json", document))


if __name__ == "__main__":
    main()
