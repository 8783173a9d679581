"""`python -m bench.micro.forms`: what ways of writing the same rows cost the target, in CPU of its backend.

In go a number of rows and batch sizes; out come microseconds a row: inserts as arrays in FROM, as arrays in step, as
typed binary arrays and by COPY; updates in the order of the source and of the key, as text and as typed arrays. Each
turn is a fresh copy of a table, written by one session with a worker's settings; the turns are interleaved, and medians
are printed.

Source: PostgreSQL manual, "SQL Functions Returning Sets" and "COPY"; array_send and the types' send functions.
"""

from __future__ import annotations

import os
import random
import struct
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import click
import psycopg
from psycopg import pq, sql
from rich.console import Console
from rich.table import Table

from bench.output import write_result
from bench.processes import ProcessWatch
from bench.report import machine_facts
from parapply.demo.binaries import find_binaries
from parapply.demo.server import PgServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_RESULTS: Final = Path(__file__).parents[1] / "results"
_COLUMNS: Final = ("id", "at", "kind", "payload")
_TYPES: Final = ("int8", "timestamptz", "int4", "text")
_OIDS: Final = (20, 1184, 23, 25)
_TEXT_OID: Final = 25
_SEED: Final = 20261121
# Rows that are there before; updates change a part of them.
_TABLE_ROWS: Final = 1_000_000
# As target/session/settings.py pins them in a worker's session.
_SESSION: Final = (
    "SET synchronous_commit = off; SET session_replication_role = replica; SET jit = off; SET TimeZone = 'UTC';"
    " SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_hashjoin = off;"
    " SET enable_mergejoin = off"
)
_MAKE: Final = f"""
CREATE TABLE template (id bigint PRIMARY KEY, at timestamptz NOT NULL, kind int NOT NULL, payload text NOT NULL);
INSERT INTO template SELECT id, timestamptz '2026-01-01 00:00:00+00', id % 10, 'Event ' || id
FROM generate_series(1, {_TABLE_ROWS}) AS id;
VACUUM (FREEZE, ANALYZE) template
"""

Row = tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to write rows.

    Attributes:
        name: for people.
        text: the statement, or the COPY command.
        make: takes a batch of rows to the parameters, or to the one piece of COPY data.
        is_copy: the text begins a COPY.
        is_update: rows are there already.
        is_sorted: rows go in the order of the key.
    """

    name: str
    text: str
    make: Callable[[Sequence[int]], list[bytes]]
    is_copy: bool = False
    is_update: bool = False
    is_sorted: bool = False


def _text_row(key: int) -> Row:
    return str(key).encode(), b"2026-11-21 12:34:56.789012+00", str(key % 10).encode(), b"Event %d new" % key


def _binary_row(key: int) -> Row:
    # Microseconds since 2000-01-01.
    at_us = 848_579_696_789_012
    return struct.pack(">q", key), struct.pack(">q", at_us), struct.pack(">i", key % 10), b"Event %d new" % key


def _element(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


def _arrays(rows: Sequence[Row], oids: Sequence[int]) -> list[bytes]:
    return [
        struct.pack(">iiIii", 1, 0, oid, len(rows), 1) + b"".join(map(_element, column))
        for oid, column in zip(oids, zip(*rows, strict=True), strict=True)
    ]


def _as_text(keys: Sequence[int]) -> list[bytes]:
    return _arrays([_text_row(key) for key in keys], [_TEXT_OID] * 4)


def _as_typed(keys: Sequence[int]) -> list[bytes]:
    return _arrays([_binary_row(key) for key in keys], _OIDS)


def _copy_text(keys: Sequence[int]) -> list[bytes]:
    return [b"".join(b"\t".join(_text_row(key)) + b"\n" for key in keys)]


def _copy_binary(keys: Sequence[int]) -> list[bytes]:
    rows = [struct.pack(">h", 4) + b"".join(map(_element, _binary_row(key))) for key in keys]
    return [b"PGCOPY\n\xff\r\n\0" + bytes(8) + b"".join(rows) + struct.pack(">h", -1)]


def _forms() -> list[Form]:
    names = ", ".join(_COLUMNS)
    cast = ", ".join(f"v.c{at}::pg_catalog.{name}" for at, name in enumerate(_TYPES))
    arrays = ", ".join(f"${at}::text[]" for at in range(1, 5))
    aliases = ", ".join(f"c{at}" for at in range(4))
    in_from = f"unnest({arrays}) AS v({aliases})"
    step = ", ".join(f"unnest(${at + 1}::text[]) AS c{at}" for at in range(4))
    typed_step = ", ".join(f"unnest(${at}::{name}[])" for at, name in enumerate(_TYPES, 1))
    typed = ", ".join(f"${at}::{name}[]" for at, name in enumerate(_TYPES, 1))
    insert, copy = f"INSERT INTO turn ({names}) SELECT", f"COPY turn ({names}) FROM STDIN"
    update = "UPDATE ONLY turn AS t SET at = {0}, kind = {1}, payload = {2} FROM unnest({3}) AS v({4}) WHERE t.id = {5}"
    of_text = [f"v.c{at}::pg_catalog.{name}" for at, name in enumerate(_TYPES)]
    text_update = update.format(*of_text[1:], arrays, aliases, of_text[0])
    typed_update = update.format("v.c1", "v.c2", "v.c3", typed, aliases, "v.c0")
    return [
        Form(name="insert: text arrays in FROM", text=f"{insert} {cast} FROM {in_from}", make=_as_text),
        Form(name="insert: text arrays in step", text=f"{insert} {cast} FROM (SELECT {step}) AS v", make=_as_text),
        Form(name="insert: typed binary arrays in step", text=f"{insert} {typed_step}", make=_as_typed),
        Form(name="insert: COPY text", text=copy, make=_copy_text, is_copy=True),
        Form(name="insert: COPY binary", text=f"{copy} (FORMAT binary)", make=_copy_binary, is_copy=True),
        Form(name="update: text arrays, source order", text=text_update, make=_as_text, is_update=True),
        Form(name="update: text arrays, key order", text=text_update, make=_as_text, is_update=True, is_sorted=True),
        Form(name="update: typed arrays, key order", text=typed_update, make=_as_typed, is_update=True, is_sorted=True),
    ]  # fmt: skip


def _measure(server: PgServer, form: Form, n_rows: int, batch_rows: int) -> float:
    """Write all rows once and return the backend's CPU, in microseconds a row."""
    server.execute("DROP TABLE IF EXISTS turn")
    server.execute("CREATE TABLE turn (LIKE template INCLUDING ALL); INSERT INTO turn SELECT * FROM template")
    server.execute("VACUUM (FREEZE, ANALYZE) turn")
    server.execute("CHECKPOINT")
    chance = random.Random(_SEED)
    keys = (
        chance.sample(range(1, _TABLE_ROWS + 1), n_rows)
        if form.is_update
        else range(_TABLE_ROWS + 1, _TABLE_ROWS + n_rows + 1)
    )
    batches = [keys[at : at + batch_rows] for at in range(0, n_rows, batch_rows)]
    sent = [form.make(sorted(batch) if form.is_sorted else batch) for batch in batches]
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(_SESSION)
        pg = connection.pgconn
        if not form.is_copy:
            pg.prepare(b"form", form.text.encode())
        watch = ProcessWatch()
        watch.add("backend", pg.backend_pid)
        for parameters in sent:
            if form.is_copy:
                with connection.cursor().copy(sql.SQL(form.text)) as copying:
                    copying.write(parameters[0])
                continue
            result = pg.exec_prepared(b"form", parameters, [1] * len(parameters))
            if result.status != pq.ExecStatus.COMMAND_OK:
                raise click.ClickException(result.get_error_message())
        return watch.usage()["backend"].cpu_s * 1e6 / n_rows


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", "n_rows", type=click.IntRange(min=1, max=_TABLE_ROWS), default=100_000, show_default=True)
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(min=1), default=[100, 2500, 10_000],
    show_default=True, help="Rows of a statement. May be given several times.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--save/--no-save", "is_saved", default=True, help="Write the JSON file.")
def main(*, n_rows: int, batches: tuple[int, ...], rounds: int, is_saved: bool) -> None:
    """Measure what each form costs the target's backend for each row."""
    at = datetime.now(UTC)
    facts = machine_facts(os.getloadavg()[0])
    forms = _forms()
    found: dict[tuple[str, int], list[float]] = {}
    binaries = find_binaries(18)
    settings: dict[str, str | int | bool] = {
        "autovacuum": False, "shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "1h"
    }  # fmt: skip
    with PgServer(binaries=binaries, settings=settings, name="forms") as server:
        facts["postgresql"] = binaries.version_text
        server.execute(_MAKE.partition("VACUUM")[0])
        server.execute("VACUUM (FREEZE, ANALYZE) template")
        for number in range(rounds):
            for form in forms if number % 2 else reversed(forms):
                for batch_rows in batches:
                    found.setdefault((form.name, batch_rows), []).append(_measure(server, form, n_rows, batch_rows))
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("us of backend CPU a row", no_wrap=True)
    for batch_rows in batches:
        grid.add_column(f"{batch_rows:,} rows", justify="right")
    for form in forms:
        grid.add_row(form.name, *(f"{median(found[form.name, batch_rows]):.1f}" for batch_rows in batches))
    console = Console(highlight=False, soft_wrap=True, width=120)
    console.print(grid)
    if is_saved:
        document = {
            "benchmark": "forms: CPU of the target's backend for each row, one session",
            "measured_at": at.isoformat(timespec="seconds"),
            "machine": facts,
            "rows": n_rows,
            "table_rows": _TABLE_ROWS,
            "us_a_row": [
                {
                    "form": name,
                    "batch_rows": size,
                    "median": round(median(each), 2),
                    "turns": [round(one, 2) for one in each],
                }
                for (name, size), each in found.items()
            ],
        }  # fmt: skip
        path = write_result(_RESULTS / f"forms-{at:%Y%m%dT%H%M%SZ}.json", document)
        console.print(f"written: bench/{_RESULTS.name}/{path.name}")


if __name__ == "__main__":
    main()
