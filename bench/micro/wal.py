"""`python -m bench.micro.wal`: WAL, CPU and time of 100,000 inserts on a target, as arrays, by COPY and row by row.

In go shapes of tables and sizes of sets; each set is a transaction. `arrays` is the daemon's own statement with its own
parameters, made before the clock starts, as are the bytes of COPY. `rows` inserts one row a statement inside a
procedure: its WAL is the built-in subscription's, its time is not. Tables hold as many rows before. Out come, for each,
bytes and records of WAL a row, without images of pages, and CPU of the session and time, by median, printed and
written as JSON.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import struct
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import psycopg
from psycopg import pq

from bench import wal
from bench.disk import slow_disk
from bench.options import FAST, Disk
from bench.output import write_result
from bench.report import machine_facts
from parapply.demo.binaries import find_binaries
from parapply.demo.server import PgServer
from parapply.demo.stage import MAJOR
from parapply.model import Column, Relation
from parapply.target.catalogue.facts import load_facts
from parapply.target.catalogue.match import match
from parapply.target.sql.statements import Statements
from parapply.wire.rows import BINARY_TYPES, columns_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from psycopg.pq.abc import PGconn, PGresult

    from bench.disk import SlowDisk
    from parapply.demo.cluster import Setting
    from parapply.target.sql.statements import Sql
    from parapply.wire.rows import KeptRow

_RESULTS: Final = Path(__file__).parents[1] / "results"
_ROWS: Final = 100_000
#: Of a server that waits for the disk at each row.
_FEW_ROWS: Final = 500
_SIZES: Final = (1000, 10_000, 100_000)
_KEY: Final = "ALTER TABLE filled ADD PRIMARY KEY (id);"
#: Statements after the table, and bytes of its text.
_SHAPES: Final[Mapping[str, tuple[str, int]]] = {
    "no index": ("", 12),
    "key": (_KEY, 12),
    "key, 2 indexes": (_KEY + "CREATE INDEX ON filled (at); CREATE INDEX ON filled (kind)", 12),
    "key, 400 bytes": (_KEY, 400),
}
#: Only here is waiting for the disk measured.
_WAITING_SHAPE: Final = "key"
_SYNCS: Final[Mapping[str, tuple[str, Disk]]] = {
    "off": ("off", FAST), "on": ("on", FAST), "on, 0.2 ms": ("on", Disk(sync_us=200)),
}  # fmt: skip
_SETTINGS: Final[Mapping[str, Setting]] = {
    "autovacuum": False, "shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "1h",
}  # fmt: skip
_TABLE: Final = """
DROP TABLE IF EXISTS filled;
CREATE TABLE filled (id int8 NOT NULL, at timestamptz NOT NULL, kind int4 NOT NULL, payload text NOT NULL);
"""
_BY_ROW: Final = """
CREATE OR REPLACE PROCEDURE fill(first int, n int, size int, commits bool) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN first .. first + n - 1 LOOP
        INSERT INTO filled VALUES (i, timestamptz '2026-01-01 00:00:00+00' + i * interval '1 s', i * 7919 % 100003,
            rpad(i::text, size, 'x'));
        IF commits THEN COMMIT; END IF;
    END LOOP;
END $$
"""
_FILL: Final = """
INSERT INTO filled
SELECT i, timestamptz '2026-01-01 00:00:00+00' + i * interval '1 s', i * 7919 %% 100003, rpad(i::text, %s, 'x')
  FROM generate_series(0, %s - 1) AS i
"""
_START: Final = datetime(2026, 1, 1, tzinfo=UTC)
#: PostgreSQL's timestamps count from here.
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_BINARY_HEAD: Final = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
_COPIES: Final = {
    "COPY text": b"COPY filled FROM STDIN",
    "COPY binary": b"COPY filled FROM STDIN (FORMAT binary)",
}


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One way to insert."""

    shape: str
    sync: str
    form: str
    set_rows: int


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """One case, once. All figures are of a row."""

    wal_bytes: float
    wal_records: float
    cpu_us: float
    time_us: float


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--rows", type=click.IntRange(min=1000), default=_ROWS, show_default=True, help="Inserted in each turn.")
@click.option("--save/--no-save", "is_saved", default=True, help="Write the JSON file.")
def main(*, rounds: int, rows: int, is_saved: bool) -> None:
    """Measure what inserts cost a target."""
    machine = machine_facts(os.getloadavg()[0])
    turns: dict[_Case, list[_Turn]] = defaultdict(list)
    with (
        slow_disk() as disk,
        PgServer(binaries=find_binaries(MAJOR), name="wal", settings=_SETTINGS, environment=disk.environment) as server,
    ):
        disk.check(server.pid)
        server.execute(_TABLE + _BY_ROW)
        for _ in range(rounds):
            for shape in _SHAPES:
                for case, turn in _Shape(server, disk, shape, rows).turns():
                    turns[case].append(turn)
    figures = [
        {
            **asdict(case),
            **{name: round(statistics.median(asdict(one)[name] for one in each), 2) for name in asdict(each[0])},
        }
        for case, each in turns.items()
    ]
    for one in figures:
        print(
            f"{one['shape']:14} sync {one['sync']:10} {one['form']:11} sets of {one['set_rows']:7,}: WAL"
            f" {one['wal_bytes']:6.1f} bytes, {one['wal_records']:5.2f} records; CPU {one['cpu_us']:6.2f},"
            f" time {one['time_us']:7.2f} us"
        )
    if is_saved:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        document = {"machine": machine, "rounds": rounds, "rows": rows, "a_row": figures}
        print(write_result(_RESULTS / f"wal-{stamp}.json", document))


class _Shape:
    """The turns of one table."""

    def __init__(self, server: PgServer, disk: SlowDisk, name: str, n_rows: int) -> None:
        self._server = server
        self._disk = disk
        self._name = name
        self._n_rows = n_rows
        self._more, self._text_bytes = _SHAPES[name]

    def turns(self) -> Iterator[tuple[_Case, _Turn]]:
        """Take a turn for each form, and yield it."""
        statement = asyncio.run(self._statement())
        rows = [_row(number, self._text_bytes) for number in range(self._n_rows, 2 * self._n_rows)]
        for sync in _SYNCS if self._name == _WAITING_SHAPE else ("off",):
            n_single = self._n_rows if sync == "off" else _FEW_ROWS
            for set_rows, n in ((1, n_single), (self._n_rows, self._n_rows)):
                case = _Case(shape=self._name, sync=sync, form="rows", set_rows=set_rows)
                yield case, self._turn(case, n, self._by_row(n, commits=set_rows == 1))
            for size in _SIZES:
                if size <= self._n_rows:
                    sets = [rows[at : at + size] for at in range(0, self._n_rows, size)]
                    for form, send in self._in_sets(sets, statement):
                        case = _Case(shape=self._name, sync=sync, form=form, set_rows=size)
                        yield case, self._turn(case, self._n_rows, send)

    async def _statement(self) -> Sql:
        """Return the daemon's insert of a set of rows into this table."""
        self._server.execute(_TABLE + self._more)
        async with await psycopg.AsyncConnection.connect(self._server.dsn(), autocommit=True) as connection:
            facts = await load_facts(connection, "public", "filled", role="replica")
        assert facts is not None, "the table was made above"
        columns = [
            Column(name=one.name, type_oid=one.type_oid, type_modifier=-1, is_key=one.name in facts.key_columns)
            for one in facts.columns
        ]
        relation = Relation(oid=1, schema="public", name="filled", replica_identity="d", columns=tuple(columns))
        return Statements(match(relation, facts), BINARY_TYPES).set_insert(tuple(range(len(columns))))

    def _by_row(self, n: int, *, commits: bool) -> Callable[[PGconn], None]:
        call = f"CALL fill({self._n_rows}, {n}, {self._text_bytes}, {commits})".encode()
        return partial(_send_call, call)

    def _in_sets(self, sets: list[list[KeptRow]], statement: Sql) -> Iterator[tuple[str, Callable[[PGconn], None]]]:
        arrays = [columns_of(each, statement.positions, statement.type_oids, 4) for each in sets]
        yield "arrays", partial(_send_arrays, statement.text, arrays)
        for form, data_of in (("COPY text", _as_text), ("COPY binary", _as_binary)):
            yield form, partial(_send_copies, _COPIES[form], [data_of(each) for each in sets])

    def _turn(self, case: _Case, n: int, send: Callable[[PGconn], None]) -> _Turn:
        """Insert into a table of its own, which holds as many rows already."""
        level, delay = _SYNCS[case.sync]
        self._server.execute(_TABLE + self._more)
        self._server.execute(_FILL, [self._text_bytes, self._n_rows])
        with psycopg.connect(self._server.dsn(), autocommit=True) as connection, self._disk.slowed(delay):
            connection.execute(f"SET session_replication_role = replica; SET synchronous_commit = {level}")
            begin = wal.position(connection)
            cpu_ns, began_ns = _cpu_ns(connection), time.monotonic_ns()
            send(connection.pgconn)
            took_ns, cpu_ns = time.monotonic_ns() - began_ns, _cpu_ns(connection) - cpu_ns
            written = wal.written_since(self._server, connection, begin)
            found = connection.execute("SELECT count(*), sum(kind), sum(id) FROM filled").fetchone()
        total = self._n_rows + n
        if found != (total, sum(number * 7919 % 100_003 for number in range(total)), total * (total - 1) // 2):
            raise click.ClickException(f"{case}: other rows than those sent: {found}")
        if written.own_bytes is None or written.records is None:
            raise click.ClickException("the WAL cannot be read; is pg_waldump beside the server's programs?")
        return _Turn(
            wal_bytes=written.own_bytes / n, wal_records=written.records / n, cpu_us=cpu_ns / 1000 / n,
            time_us=took_ns / 1000 / n,
        )  # fmt: skip


def _row(number: int, text_bytes: int) -> KeptRow:
    """Return a row as pgoutput sends it: values in text form, each after its length."""
    at = f"{_START + timedelta(seconds=number):%Y-%m-%d %H:%M:%S}+00"
    values = (str(number), at, str(number * 7919 % 100_003), f"{number}".ljust(text_bytes, "x"))
    return [struct.pack(">i", len(value)) + value.encode() for value in values]


def _as_text(rows: list[KeptRow]) -> bytes:
    return b"".join(b"\t".join([value[4:] for value in row]) + b"\n" for row in rows)  # type: ignore[index]


def _as_binary(rows: list[KeptRow]) -> bytes:
    out = [_BINARY_HEAD]
    for row in rows:
        number, at, kind, payload = [value[4:] for value in row]  # type: ignore[index]
        at_us = (datetime.fromisoformat(at.decode()) - _EPOCH) // timedelta(microseconds=1)
        out.append(struct.pack(">hiqiqiii", 4, 8, int(number), 8, at_us, 4, int(kind), len(payload)) + payload)
    return b"".join([*out, struct.pack(">h", -1)])


def _send_call(call: bytes, pg: PGconn) -> None:
    _check(pg.exec_(call), pg)


def _send_arrays(text: bytes, sets: list[list[bytes | None]], pg: PGconn) -> None:
    _check(pg.prepare(b"", text), pg)
    for arrays in sets:
        parameters = [array for array in arrays if array is not None]
        _check(pg.exec_prepared(b"", parameters, [pq.Format.BINARY] * len(parameters)), pg)


def _send_copies(command: bytes, sets: list[bytes], pg: PGconn) -> None:
    for data in sets:
        result = pg.exec_(command)
        if result.status != pq.ExecStatus.COPY_IN:
            _check(result, pg)
        pg.put_copy_data(data)
        pg.put_copy_end()
        while (ended := pg.get_result()) is not None:
            _check(ended, pg)


def _check(result: PGresult, pg: PGconn) -> None:
    if result.status != pq.ExecStatus.COMMAND_OK:
        raise click.ClickException(f"the server refused: {pg.error_message.decode()}")


def _cpu_ns(connection: psycopg.Connection[Any]) -> int:
    """Return the session's CPU since its start. Source: the kernel's documentation, "sched-stats"."""
    return int(Path(f"/proc/{connection.info.backend_pid}/schedstat").read_text(encoding="ascii").split()[0])


if __name__ == "__main__":
    main()
