"""Notes of a migration for other sessions: only of this migration; a standstill is noted once and ends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.config import load_config
from parapply.login import Login
from parapply.migrate.noting import Noter
from parapply.migrate.show import Screen
from parapply.target.session import settings
from parapply.target.state import migrations
from parapply.target.state.moves import read_moves
from parapply.target.state.schema import ensure_schema
from parapply.vocabulary import MigrationStep
from tests.fixtures.route import Route

if TYPE_CHECKING:
    import pytest

    from tests.fixtures.daemon import RunCommand
    from tests.fixtures.databases import Database

_REFUSED = 4


async def test_notes_are_of_this_migration_and_their_failure_ends_no_step(
    target_db: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rehearsal from another cluster left steps of the same slot; then the notes cannot be read any more."""
    config = load_config(
        flags={"source.slot": "s", "target.dsn": target_db.dsn, "metrics.listen": "127.0.0.1:0"},
        environ={},
        required=(),
    )
    rehearsal, own = [
        migrations.Migration(schema="parapply", slot_name="s", system_identifier=one) for one in ("9", "1")
    ]
    conn = await settings.connect_control(Login(target_db.dsn), role="replica", application_name="test")
    async with conn, Noter(config, own, Screen(as_json=False)) as noter:
        noter.begin(MigrationStep.CHECK)
        assert b'step="check",state="running"} 1' in noter._answer("/metrics")[2]
        await ensure_schema(conn, "parapply")
        await migrations.begin(conn, rehearsal, MigrationStep.COPY)
        await migrations.end(conn, rehearsal, MigrationStep.COPY, "", is_done=True)
        await noter.end()
        assert b'step="copy"' not in noter._answer("/metrics")[2]
        await migrations.begin(conn, own, MigrationStep.SCHEMA)
        noter.begin(MigrationStep.SCHEMA)
        await noter.end()
        text = noter._answer("/metrics")[2]
        assert b'step="schema",state="running"} 1' in text
        assert b'step="copy"' not in text
        assert [one["step"] for one in (await read_moves(conn, "parapply", "s", None)).migration] == ["schema"]
        await conn.execute("ALTER TABLE parapply.migrations DROP COLUMN size_bytes")
        noter.begin(MigrationStep.COPY)
        for _ in range(2):
            await noter.end()
        assert b"parapply_migration" not in noter._answer("/metrics")[2]
    assert capsys.readouterr().err.count("column m.size_bytes does not exist") == 1


def test_an_older_state_is_shown_by_no_command(
    source_db: Database, target_db: Database, run_command: RunCommand
) -> None:
    """`status` and `migrate --show` next to an older daemon refuse its tables, and leave them as they are."""
    target_db.execute(
        "UPDATE parapply.schema_version SET version = 15; ALTER TABLE parapply.migrations DROP COLUMN size_bytes"
    )
    route = Route(source=source_db, target=target_db, source_dsn=source_db.dsn, target_dsn=target_db.dsn)
    for command in (("status",), ("migrate", "--show")):
        shown = run_command(route, *command)
        assert (shown.returncode, "has version 15" in shown.stderr) == (_REFUSED, True), shown.stderr
    assert target_db.rows("SELECT version FROM parapply.schema_version") == [(15,)]
