"""WAL of a server between two moments: bytes, records, and images of pages.

In go a server and the position at the first moment; out comes what was written since then, by all of its processes.
Nothing but the measured system may write in between. After a checkpoint the first change of a page adds the page's
image, so both moments belong into one interval between checkpoints, and what is compared begins with a checkpoint.

Source: PostgreSQL manual, "pg_waldump". `pg_stat_wal` is no source, because sessions report to it once a second.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import psycopg

    from parapply.demo.server import PgServer

#: Numbers of the line of all records: records, bytes without images, bytes of images.
_TOTAL: Final = re.compile(r"^Total\s+(\d+)\s+(\d+) \[.*?\]\s+(\d+) \[", re.MULTILINE)
_POSITION: Final = "SELECT pg_current_wal_insert_lsn()::text"
_WRITTEN: Final = """
    SELECT now_at::text, (now_at - %s::pg_lsn)::bigint, pg_walfile_name(%s), pg_walfile_name(now_at)
      FROM pg_current_wal_insert_lsn() AS now_at
"""
#: Everything before the message can be read then, because its commit waits for the flush.
_FLUSH: Final = """
    SELECT set_config('synchronous_commit', 'on', true), pg_logical_emit_message(true, 'parapply bench', '')
"""
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Wal:
    """WAL between two moments.

    Attributes:
        written_bytes: all of it, with the headers of its pages.
        records: `None` where they cannot be read, as below.
        image_bytes: images of pages; `None` without pg_waldump, or where a checkpoint has removed the begin.
    """

    written_bytes: int
    records: int | None = None
    image_bytes: int | None = None

    @property
    def own_bytes(self) -> int | None:
        """The bytes without images; `None` as above."""
        return None if self.image_bytes is None else self.written_bytes - self.image_bytes


def position(connection: psycopg.Connection[Any]) -> str:
    """Return the position at which the next record will be.

    Raises:
        psycopg.Error: the server refused or went away.
    """
    return str(_row(connection, _POSITION)[0])


def written_since(server: PgServer, connection: psycopg.Connection[Any], begin: str) -> Wal:
    """Return the WAL since a position; the connection is one of this server, in autocommit mode.

    Raises:
        psycopg.Error: the server refused or went away.
    """
    end, written_bytes, *names = _row(connection, _WRITTEN, begin, begin)
    connection.execute(_FLUSH)
    # Another version's program does not read these files.
    program = server.binaries.bin_dir / "pg_waldump"
    if not program.exists():
        return Wal(written_bytes=written_bytes)
    # With the directory alone it looks at any file for their size, also at one that was made ahead and is empty.
    files = [str(server.data_dir / "pg_wal" / name) for name in names]
    command = [str(program), "--stats", f"--start={begin}", f"--end={end}", *files]
    done = subprocess.run(  # noqa: S603  a program of the installation, no shell
        command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    found = _TOTAL.search(done.stdout) if done.returncode == 0 else None
    if found is None:
        return Wal(written_bytes=written_bytes)
    return Wal(written_bytes=written_bytes, records=int(found[1]), image_bytes=int(found[3]))


def _row(connection: psycopg.Connection[Any], query: str, *values: str) -> tuple[Any, ...]:
    row = connection.execute(query, values).fetchone()
    assert row is not None, "a query of one row"
    return tuple(row)
