"""Order of the copy: connection and time of each part, and the messages about it where no terminal is."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from parapply.copy.bar import Bar, CopyProgress
from parapply.copy.load import PartQueue
from parapply.copy.parts import Part
from parapply.copy.published import PublishedTable

if TYPE_CHECKING:
    from parapply.plan.copy_starts import Name


def _parts(name: str, count: int) -> list[Part]:
    return [Part(schema="s", name=name, first_page=number, pages=2, estimated_rows=200) for number in range(count)]


def _name(number: int) -> Name:
    return ("s", f"t{number:02}")


@pytest.fixture
def tables() -> dict[Name, list[Part]]:
    """Sixteen tables, each larger than the one before, and one of nothing."""
    return {_name(number): _parts(f"t{number:02}", number) for number in range(17)}


def test_each_connection_has_a_table_of_its_own(tables: dict[Name, list[Part]]) -> None:
    """Small tables are complete soon, however large the largest is: connections share one only when all are begun."""
    queue = PartQueue(tables)
    first = {connection: queue.take(connection) for connection in (1, 2, 3, 4)}
    assert {connection: taken and taken[0] for connection, taken in first.items()} == {
        1: _name(1), 2: _name(16), 3: _name(2), 4: _name(15)
    }  # fmt: skip
    assert queue.take(1) == (_name(3), tables[_name(3)][0]), "the first table has one part only"
    assert queue.take(2) == (_name(16), tables[_name(16)][1])


@pytest.mark.parametrize("connections", [1, 3, 64])
def test_every_part_is_given_out_once(tables: dict[Name, list[Part]], connections: int) -> None:
    """In turns all connections take all parts, each once, and each table's parts in their order."""
    queue = PartQueue(tables)
    given: list[Part] = []
    idle: set[int] = set()
    while len(idle) < connections:
        for connection in range(1, connections + 1):
            taken = queue.take(connection)
            if taken is None:
                idle.add(connection)
            else:
                assert connection not in idle, "what was empty has nothing more"
                given.append(taken[1])
    assert Counter((part.name, part.first_page) for part in given) == Counter(
        (part.name, part.first_page) for parts in tables.values() for part in parts
    )
    for name, parts in tables.items():
        assert [part for part in given if part.name == name[1]] == parts


def test_one_connection_begins_with_the_smallest(tables: dict[Name, list[Part]]) -> None:
    """An interrupted copy then keeps most tables."""
    queue = PartQueue(tables)
    order = []
    while (taken := queue.take(1)) is not None:
        order.append(taken[0])
    assert list(dict.fromkeys(order)) == sorted(_name(number) for number in range(1, 17))


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten seconds after the last one: share, rows, bytes, rates, time left and tables, on standard error."""
    now_s = 100.0
    heard: list[CopyProgress] = []
    with Bar(clock=lambda: now_s, listener=heard.append) as bar:
        bar.begin(parts=10, pages=20, rows=2000)
        bar.data(100, 1_000_000, "s.large")
        assert capsys.readouterr() == ("", "")
        now_s = 110.0
        bar.part_done(_parts("large", 1)[0], 100)
        bar.data(100, 1_000_000, "s.small")
        said = "copying: 10%, 100 rows, 10 rows/s, 1 MB, 0 MB/s, about 90 s left; now s.large\n"
        assert capsys.readouterr() == ("", said)
        small = PublishedTable(
            schema="s", name="small", columns=(), types=(), modifiers=(), row_filter="", key=(), leaves=(), oid=1
        )
        bar.table_done(small, 100, 1_000_000)
        now_s = 120.0
        bar.data(800, 8_000_000, "s.large")
        out, err = capsys.readouterr()
        assert out == "s.small: 100 rows, 1.0 MB\n"
        assert err == "copying: 55%, 1,000 rows, 50 rows/s, 10 MB, 0 MB/s, about 16 s left; now s.large\n"
        n_heard = len(heard)
        bar.data(1000, 10_000_000, "s.large")
        assert len(heard) == n_heard
    assert (heard[-1].rows, heard[-1].size_bytes) == (2000, 20_000_000)
