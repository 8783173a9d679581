"""Tables that `parapply bench --copy` copies, of several shapes.

In go a stage whose servers are empty and a scale; out come tables with rows on the publisher, published, and the same
tables without rows on the subscriber.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from parapply.demo.stage import BANK, PUBLICATION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.options import CopyShapeName
    from parapply.demo.stage import Stage

_SMALL_TABLES: Final = 40
_SMALL_ROWS: Final = 1000
_MIDDLING_TABLES: Final = 8
_MIDDLING_ROWS_PER_SCALE: Final = 12_500
_WIDE_TABLES: Final = 2
_WIDE_ROWS_PER_SCALE: Final = 5_000


@dataclass(frozen=True, kw_only=True)
class CopyShape:
    """Some tables.

    Attributes:
        text: what they are, for people.
        make: makes them on both servers, with rows on the publisher only.
    """

    text: str
    make: Callable[[Stage, int], None]


def _one_large(stage: Stage, scale: int) -> None:
    stage.fill_bank(scale)
    small = "; ".join(
        f"CREATE TABLE small_{number} (id int PRIMARY KEY, v text, at timestamptz)" for number in range(_SMALL_TABLES)
    )
    for server in (stage.source, stage.target):
        server.execute(small, dbname=BANK)
    for number in range(_SMALL_TABLES):
        stage.source.execute(
            f"INSERT INTO small_{number} SELECT i, md5(i::text), now() FROM generate_series(1, {_SMALL_ROWS}) AS i",  # noqa: S608  numbers
            dbname=BANK,
        )
    stage.target.execute("TRUNCATE pgbench_accounts, pgbench_branches, pgbench_tellers, pgbench_history", dbname=BANK)


def _middling(stage: Stage, scale: int) -> None:
    tables = [f"orders_{number}" for number in range(_MIDDLING_TABLES)]
    _make(
        stage,
        [
            f"CREATE TABLE {table} (id bigint PRIMARY KEY, customer int NOT NULL, at timestamptz NOT NULL,"
            f" amount numeric(12, 2) NOT NULL, rate float8, token uuid NOT NULL, note text);"
            f" CREATE INDEX ON {table} (at)"
            for table in tables
        ],
        [
            f"INSERT INTO {table} SELECT i, i % 5000, timestamptz '2026-01-01' + i * interval '7 s', i * 1.37, i / 7.0,"  # noqa: S608  numbers
            f" md5(i::text)::uuid, repeat('x', i % 60) FROM generate_series(1, {_MIDDLING_ROWS_PER_SCALE * scale}) AS i"
            for table in tables
        ],
    )


def _wide(stage: Stage, scale: int) -> None:
    # Texts that TOAST neither compresses nor moves away: below its threshold of about 2 kB a row.
    tables = [f"documents_{number}" for number in range(_WIDE_TABLES)]
    _make(
        stage,
        [f"CREATE TABLE {table} (id bigint PRIMARY KEY, title text NOT NULL, body text NOT NULL)" for table in tables],
        [
            f"INSERT INTO {table} SELECT i, 'document ' || i, (SELECT string_agg(md5((i * 50 + j)::text), E' \\n')"  # noqa: S608  numbers
            f" FROM generate_series(1, 45) AS j) FROM generate_series(1, {_WIDE_ROWS_PER_SCALE * scale}) AS i"
            for table in tables
        ],
    )


def _make(stage: Stage, tables: list[str], rows: list[str]) -> None:
    for server in (stage.source, stage.target):
        server.execute(f"CREATE DATABASE {BANK}")
        for statement in tables:
            server.execute(statement, dbname=BANK)
    for statement in rows:
        stage.source.execute(statement, dbname=BANK)
    stage.source.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES", dbname=BANK)


SHAPES: Final[Mapping[CopyShapeName, CopyShape]] = {
    "one-large": CopyShape(
        text="pgbench's tables, one of them nearly everything, and forty small ones", make=_one_large
    ),
    "middling": CopyShape(text="eight tables of numbers, times and short texts with a second index", make=_middling),
    "wide": CopyShape(text="two tables of texts of 1.5 kB", make=_wide),
}
