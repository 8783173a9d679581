"""The soak: `python -m tests.faults.soak`, or `make soak`. A mixed load for half an hour, first with random kills.

In go minutes and a seed; out come samples of memory, descriptors, state tables, slot and apply log, and whether each of
them stays flat: memory and descriptors in the last daemon's life, the rest over all lives.
"""

from __future__ import annotations

import platform
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from parapply import WHY_INTERPRETED, __version__
from tests.faults.lab import Options, Round, servers

if TYPE_CHECKING:
    from tests.faults.oracles import Findings

_SAMPLE_S = 5.0
#: Kills come in this part of the time; the life after them is long enough to see memory grow.
_KILLS_UNTIL = 0.5
_KILL_EVERY_S = 45.0
#: In that life the stream is lost so often: each reconnect makes every part of the daemon again.
_LOSS_EVERY_S = 10.0
# Python's allocator moves by such steps; a leak of one object a transaction is far more in half an hour.
_SLOPE_LIMIT_BYTES_S = 16 * 1024
_GROWTH_LIMIT_BYTES = 24 * 1024 * 1024
_DESCRIPTORS_LIMIT = 4
_APPLIED_LIMIT = 5000
_PINNED_LIMIT_BYTES = 256 * 1024 * 1024
_RETENTION_BYTES = 4 << 20
# Bytes that rotation and retention leave at most: a file being written and one more.
_LOG_LIMIT_BYTES = _RETENTION_BYTES + (4 << 20)


class Sample(msgspec.Struct, kw_only=True):
    """Measurements of one moment."""

    at_s: float
    pid: int
    resident_bytes: int
    descriptors: int
    applied_rows: int
    state_bytes: int
    retained_wal_bytes: int
    log_bytes: int
    transactions: int


@click.command()
@click.option("--minutes", default=30.0, show_default=True, help="How long.")
@click.option("--seed", default="1", show_default=True, help="Of the load and the kills.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here.")
def main(*, minutes: float, seed: str, json_path: Path | None) -> None:
    """Run a mixed load with random kills, then with lost streams; ends with 1 if anything grows."""
    chooser = random.Random(seed)
    options = Options(
        seed=seed, is_two_phase=True, pace_s=0.08, reader_pace_s=5.0,
        settings={"apply.workers": 4, "source.streaming": "parallel", "applylog.retention_bytes": _RETENTION_BYTES},
    )  # fmt: skip
    samples: list[Sample] = []
    with servers() as made, Round(made, options) as run:
        began_s = time.monotonic()
        kills, losses = _soak(run, chooser, minutes * 60, samples)
        found = run.finish()
        took_s = time.monotonic() - began_s
        version = made.source.binaries.version_text
        n_transactions = run.n_transactions
    verdicts = judge(samples)
    result = {
        "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "parapply": __version__, "compiled": not WHY_INTERPRETED,
        "server": version, "python": platform.python_version(), "seed": seed, "minutes": round(took_s / 60, 1),
        "kills": kills, "losses": losses, "transactions": n_transactions, "lost": found.lost,
        "duplicated": found.duplicated, "torn": found.torn, "other": found.other, "texts": found.texts,
        "verdicts": verdicts, "samples": samples,
    }  # fmt: skip
    if json_path:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    for name, (value, limit, is_good) in verdicts.items():
        click.echo(f"{'well ' if is_good else 'FOUND'} {name}: {value:,.0f} (limit {limit:,.0f})")
    click.echo(f"{n_transactions} transactions, {kills} kills, {losses} lost streams: lost {found.lost}, "
               f"doubled {found.duplicated}, torn {found.torn}, other {found.other} {found.texts}")  # fmt: skip
    sys.exit(1 if found or not all(is_good for _, _, is_good in verdicts.values()) else 0)


def _soak(run: Round, chooser: random.Random, duration_s: float, samples: list[Sample]) -> tuple[int, int]:
    """Sample until the time is over, with kills in its first part and lost streams afterwards; return their numbers."""
    began_s = time.monotonic()
    next_fault_s = began_s + chooser.expovariate(1 / _KILL_EVERY_S)
    kills = losses = 0
    columns = (TextColumn("soak"), BarColumn(), TextColumn("{task.fields[counts]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("soak", total=duration_s, counts="")
        while (past_s := time.monotonic() - began_s) < duration_s:
            samples.append(_sample(run, past_s))
            progress.update(task, completed=past_s, counts=f"{samples[-1].transactions} transactions, {kills} kills")
            is_killing = past_s < _KILLS_UNTIL * duration_s
            if time.monotonic() >= next_fault_s:
                if is_killing:
                    run.daemon.kill()
                    run.start_connected()
                    kills += 1
                else:
                    losses += _lose_stream(run)
                every_s = _KILL_EVERY_S if is_killing else _LOSS_EVERY_S
                next_fault_s = time.monotonic() + chooser.expovariate(1 / every_s)
            run.daemon.check_running()
            Event().wait(_SAMPLE_S)
        progress.update(task, completed=duration_s)
    found: Findings = run.check()
    assert not found, found.texts
    return kills, losses


def _lose_stream(run: Round) -> int:
    """End the sender of the stream; return how many were ended: none while the daemon connects."""
    query = f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{run.route.slot}'"
    return sum(bool(is_ended) for (is_ended,) in run.source.rows(query))


def _sample(run: Round, past_s: float) -> Sample:
    process = Path(f"/proc/{run.daemon.pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text(encoding="ascii").splitlines())
    ((applied_rows, state_bytes),) = run.target.rows(
        "SELECT (SELECT count(*) FROM parapply.applied), (SELECT sum(pg_total_relation_size(oid)) FROM pg_class"
        " WHERE relnamespace = 'parapply'::regnamespace AND relkind = 'r')"
    )
    ((retained,),) = run.source.rows(
        "SELECT pg_current_wal_insert_lsn() - restart_lsn FROM pg_replication_slots"
        f" WHERE slot_name = '{run.route.slot}'"
    )
    log = run.directory / "log"
    return Sample(
        at_s=round(past_s, 1), pid=run.daemon.pid, resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
        descriptors=len(list((process / "fd").iterdir())), applied_rows=applied_rows, state_bytes=int(state_bytes),
        retained_wal_bytes=int(retained), log_bytes=sum(one.stat().st_size for one in log.iterdir()),
        transactions=run.n_transactions,
    )  # fmt: skip


def judge(samples: list[Sample]) -> dict[str, tuple[float, float, bool]]:
    """Return by name what was measured, its limit, and whether it keeps to it.

    Memory and descriptors: of the last daemon, without the first third of its life. The rest: over the whole time.
    """
    last = [one for one in samples if one.pid == samples[-1].pid]
    steady = last[len(last) // 3 :]
    third = len(steady) // 3 + 1
    slope = _slope([(one.at_s, one.resident_bytes) for one in steady])
    growth = max(one.resident_bytes for one in steady) - min(one.resident_bytes for one in steady[:third])
    # Fewer while the daemon connects.
    descriptors = [max(one.descriptors for one in part) for part in (steady[:third], steady[-third:])]
    values = {
        "resident memory, slope in bytes a second": (slope, _SLOPE_LIMIT_BYTES_S),
        "resident memory, growth in bytes": (growth, _GROWTH_LIMIT_BYTES),
        "descriptors, growth of the largest number": (descriptors[1] - descriptors[0], _DESCRIPTORS_LIMIT),
        "record rows": (max(one.applied_rows for one in samples), _APPLIED_LIMIT),
        "WAL kept for the slot, bytes": (max(one.retained_wal_bytes for one in samples), _PINNED_LIMIT_BYTES),
        "apply log, bytes": (max(one.log_bytes for one in samples), _LOG_LIMIT_BYTES),
    }
    return {name: (float(value), float(limit), value <= limit) for name, (value, limit) in values.items()}


def _slope(points: list[tuple[float, int]]) -> float:
    """Return the slope of the line through points that has the least squares; 0 for fewer than three."""
    if len(points) < 3:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


if __name__ == "__main__":
    main()
