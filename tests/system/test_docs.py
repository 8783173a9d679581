"""Every command of the documents, run: each page on a publisher and a target of its own, block after block.

Names in a page are compared with the code by tests/unit/test_documents.py.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

import pytest

from parapply.demo.errors import DemoError
from tests.fixtures.databases import Database, drop_database
from tests.fixtures.document_page import PREPARATIONS, TUTORIAL_ORDERS, TUTORIAL_ROLES, Page, Tutorial
from tests.fixtures.documents import Block, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _pytest.mark import ParameterSet

    from tests.fixtures.servers import ServerOf

# Seconds on a quiet machine: a page is a dozen processes, one after the other.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_RUN = [one for one in blocks() if one.is_run]
_README = "README.md"
_TUTORIALS = "docs/tutorials/"
#: Pages run between two versions, because they are about that; the others are run between two servers of one.
_UPGRADES = ("cloud-to-cloud", "major-upgrade")
#: Goes on from the steps 1 to 3 of the other page, whose blocks they are, and comes back to where they end.
_UPGRADE, _WAY_BACK, _STEPS = f"{_TUTORIALS}major-upgrade.md", f"{_TUTORIALS}way-back.md", 4
_OLD, _NEW = 15, 18


@pytest.fixture
def page(tmp_path: Path, source_db: Database, target_db: Database) -> Iterator[Page]:
    """A page on two databases; no daemon of it is left."""
    made = Page(tmp_path, source_db, target_db)
    yield made
    made.end()


@pytest.fixture
def tutorial(name: str, tmp_path: Path, server_of: ServerOf) -> Iterator[Tutorial]:
    """A page on two servers; no daemon and no role of it is left."""
    before = server_of("source", _OLD if name.endswith(tuple(f"{one}.md" for one in _UPGRADES)) else _NEW)
    after = server_of("target", _NEW)
    # Not from the tests' template: its grants are those that the reader of the pages gives.
    ends = [Database(dbname=f"tutorial_{secrets.token_hex(4)}", server=server) for server in (before, after)]
    for one in ends:
        one.server.execute(f"CREATE DATABASE {one.dbname} TEMPLATE template0")
    made = Tutorial(tmp_path, *ends)
    yield made
    made.end()
    for one in reversed(ends):
        drop_database(one)
    for server in (before, after):
        for role in TUTORIAL_ROLES:
            server.execute(f"DROP ROLE IF EXISTS {role}")


def _blocks_of(name: str) -> list[Block]:
    """Return the blocks of a tutorial that are to be run."""
    of_page = [one for one in blocks() if one.page == name and one.language in {"sh", "sql"}]
    assert [str(one) for one in of_page if not one.is_run] == []
    return of_page


def _with_the_way_back() -> list[Block]:
    """Return the blocks of the upgrade with the way back's inside; the end of both, which is the same, once."""
    upgrade, (*back, last) = _blocks_of(_UPGRADE), _blocks_of(_WAY_BACK)
    before, after = upgrade[:_STEPS], upgrade[_STEPS:]
    assert "parapply verify" in before[-1].text
    assert "--print-reverse" in after[0].text
    rest = iter("\n".join(one.text for one in after).splitlines())
    assert all(line in rest for line in last.text.splitlines()), "the way back ends otherwise than the upgrade"
    return [*before, *back, *after]


def _pages() -> list[ParameterSet]:
    """Return the pages with something to run, marked with what not every machine has."""
    with_jq = {one.page for one in _RUN if re.search(r"\bjq\b", one.text)}
    names = sorted({one.page for one in _RUN if not one.page.startswith(_TUTORIALS)})
    return [pytest.param(name, marks=[pytest.mark.jq] if name in with_jq else [], id=name) for name in names]


@pytest.mark.parametrize("name", _pages())
def test_the_commands_of_a_page_work(page: Page, name: str) -> None:
    """Carried out in their order, all blocks of a page that are to be run end as the page says."""
    if name == _README:
        page.source.execute("DROP PUBLICATION app")
    for block in _RUN:
        if block.page == name:
            page.run(block)
    if name == _README:
        # The way on own servers ends with a row that is replicated.
        page.source.execute("INSERT INTO orders VALUES (4711, 1)")
        page.target.wait_until("SELECT count(*) = 1 FROM orders WHERE id = 4711")


@pytest.mark.needs_majors(_OLD, _NEW)
@pytest.mark.parametrize("name", sorted({one.page for one in _RUN if one.page.startswith(_TUTORIALS)} - {_WAY_BACK}))
def test_the_commands_of_a_tutorial_work(tutorial: Tutorial, name: str) -> None:
    """Every command that a tutorial has works, from an application's database on; then both sides are equal.

    The way back is run inside the upgrade that it goes on from, on one pair of databases: there the first cut-over is
    its own, and the upgrade's comes after it. Their last commands are the same and run once.
    """
    for block in _with_the_way_back() if name == _UPGRADE else _blocks_of(name):
        tutorial.run(block)
    assert tutorial.target.rows(f"SELECT count(*) >= {TUTORIAL_ORDERS} FROM orders") == [(True,)]
    triggers = "SELECT tgenabled::text FROM pg_trigger WHERE NOT tgisinternal"
    assert tutorial.target.rows(triggers) == [("O",)]
    for query in ("SELECT * FROM orders ORDER BY id", "SELECT * FROM audit ORDER BY id"):
        assert tutorial.source.rows(query) == tutorial.target.rows(query)


def test_the_page_lists_the_tables_whose_updates_would_fail(source_db: Database) -> None:
    """Before they are published: those whose UPDATE the server refuses once they are, and no others."""
    source_db.execute(
        "CREATE TABLE plain (i int PRIMARY KEY); CREATE TABLE later (i int PRIMARY KEY DEFERRABLE);"
        "CREATE TABLE whole (i int); ALTER TABLE whole REPLICA IDENTITY FULL; CREATE TABLE none (i int);"
        "CREATE TABLE named (i int NOT NULL CONSTRAINT by_i UNIQUE);"
        "ALTER TABLE named REPLICA IDENTITY USING INDEX by_i; CREATE UNLOGGED TABLE local (i int)"
    )
    (query,) = [one.text for one in _blocks_of("docs/how-to/check.md") if one.language == "sql"]
    listed = {str(name) for (name,) in source_db.rows(query.replace("SELECT oid::regclass", "SELECT relname", 1))}
    source_db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    refused = set()
    for (name,) in source_db.rows(
        "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
    ):
        try:
            source_db.execute(f"UPDATE {name} SET i = 1")
        except DemoError:
            refused.add(str(name))
    assert listed == refused == {"later", "none"}


def test_every_preparation_is_used() -> None:
    """The preparations that blocks ask for exist, and no others."""
    assert {one.how["before"] for one in _RUN if one.how["before"]} == set(PREPARATIONS)


def test_a_failing_block_fails(page: Page) -> None:
    """A page whose command ends otherwise than it says is found."""
    wrong = Block(page="page", line=1, language="sh", text="parapply status --config app.toml", marker="run")
    with pytest.raises(AssertionError, match="exit 4"):
        page.run(wrong)
