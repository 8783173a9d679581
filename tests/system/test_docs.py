"""Every command of the documents, run: each page on a publisher and a target of its own, block after block.

What a page names is held against the code by tests/unit/test_documents.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.document_page import PREPARATIONS, Page
from tests.fixtures.documents import Block, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _pytest.mark import ParameterSet

    from tests.fixtures.databases import Database

# Seconds on a quiet machine: a page is a dozen processes, one after the other.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_RUN = [one for one in blocks() if one.is_run]


@pytest.fixture
def page(tmp_path: Path, source_db: Database, target_db: Database) -> Iterator[Page]:
    """A page on two databases; no daemon of it is left."""
    made = Page(tmp_path, source_db, target_db)
    yield made
    made.end()


def _pages() -> list[ParameterSet]:
    """Return the pages with something to run, marked with what not every machine has."""
    with_jq = {one.page for one in _RUN if re.search(r"\bjq\b", one.text)}
    names = sorted({one.page for one in _RUN})
    return [pytest.param(name, marks=[pytest.mark.jq] if name in with_jq else [], id=name) for name in names]


@pytest.mark.parametrize("name", _pages())
def test_the_commands_of_a_page_work(page: Page, name: str) -> None:
    """Carried out in their order, all blocks of a page that are to be run end as the page says."""
    for block in _RUN:
        if block.page == name:
            page.run(block)


def test_every_preparation_is_used() -> None:
    """What a block asks for is there, and nothing else."""
    assert {one.how["before"] for one in _RUN if one.how["before"]} == set(PREPARATIONS)


def test_a_failing_block_fails(page: Page) -> None:
    """A page whose command ends otherwise than it says is found."""
    wrong = Block(page="page", line=1, language="sh", text="parapply status --config app.toml", marker="run")
    with pytest.raises(AssertionError, match="exit 4"):
        page.run(wrong)
