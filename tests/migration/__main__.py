"""The migration of a large database: `python -m tests.migration --size-mb 1000`."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
from psycopg import sql

from parapply import __version__
from parapply.demo.binaries import find_binaries
from parapply.demo.server import PgServer
from tests.fixtures.databases import create_database
from tests.fixtures.memory import memory_directory
from tests.fixtures.servers import _SETTINGS_OF_18, TEST_SETTINGS
from tests.migration import tables
from tests.migration.run import Migration

_ROLE = 'Owner of "all"'


@click.command()
@click.option("--size-mb", default=100, show_default=True, help="Of the source database, about.")
@click.option("--from", "source_major", default=15, show_default=True, help="Major version of the source.")
@click.option("--to", "target_major", default=18, show_default=True, help="Major version of the target.")
@click.option("--kills", default=10, show_default=True, help="Of `migrate`; each of both cut-overs is killed once.")
@click.option("--per-s", default=100.0, show_default=True, help="Transactions a second.")
@click.option("--seed", default="1", show_default=True, help="Of kills, schema changes and load.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here.")
def main(
    *, size_mb: int, source_major: int, target_major: int, kills: int, per_s: float, seed: str, json_path: Path | None
) -> None:
    """Migrate a database under load, cut over, go back, and look for lost, doubled and torn transactions.

    Ends with 1 if anything was found.
    """
    began_s = time.monotonic()
    memory = memory_directory()
    if memory is not None:
        os.environ["TMPDIR"] = str(memory)
        tempfile.tempdir = None
    with ExitStack() as stack:
        servers = []
        for name, major in (("source", source_major), ("target", target_major)):
            binaries = find_binaries(major)
            settings = {**TEST_SETTINGS, **(_SETTINGS_OF_18 if major >= 18 else {}), "max_wal_size": "4GB"}
            servers.append(stack.enter_context(PgServer(binaries=binaries, settings=settings, name=name)))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source, target = (create_database(server, "app") for server in servers)
        source.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(_ROLE)))
        tables.make(source, _ROLE, size_mb)
        click.echo(f"made in {time.monotonic() - began_s:.0f} s", err=True)
        begun_s = time.monotonic()
        pace_s = max(0.3, size_mb / 300)
        with Migration(
            source, target, _ROLE, directory, seed=seed, kills=kills, pace_s=pace_s, per_s=per_s,
            tell=lambda line: click.echo(line, err=True),
        ) as run:  # fmt: skip
            account = run.run()
        took_s = time.monotonic() - begun_s
        versions = [server.binaries.version_text for server in servers]
    result = {
        "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "parapply": __version__, "python": platform.python_version(),
        "source": versions[0], "target": versions[1], "seed": seed, "size_mb": size_mb, "per_s": per_s,
        "source_bytes": account.source_bytes, "seconds": round(took_s, 1), "schema_changes": account.changes,
        "found": account.total, "stages": account.stages,
    }  # fmt: skip
    if json_path:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    for one in account.stages:
        gap = f", no client could write for {one.gap_s:.1f} s" if one.gap_s is not None else ""
        click.echo(
            f"{one.name}: {one.seconds:.1f} s,"
            f" killed {len(one.kills)} times, ended by itself {one.ended}{gap}; lost {one.lost}, doubled"
            f" {one.duplicated}, torn {one.torn}, other {one.other} {one.texts}"
        )
    click.echo(f"{account.source_bytes:,} bytes in {took_s:.0f} s: {account.total} found")
    sys.exit(1 if account.total else 0)


if __name__ == "__main__":
    main()
