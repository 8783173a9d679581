"""A root is announced with no more than old rows of each of its partitions hold, in whatever order they come (T-28)."""

from __future__ import annotations

import pytest

from parapply.model import Relation
from parapply.wire.assembler import Assembler
from tests import build

_ROOT, _ONE, _TWO = 1, 2, 3


def _relation(oid: int, *keys: str, identity: str = "d", xid: int | None = None) -> bytes:
    columns = [build.ColumnSpec(name, flags=int(name in keys)) for name in ("a", "b")]
    return build.relation(*columns, oid=oid, name=f"t{oid}", replica_identity=identity, xid=xid)


def _root(xid: int | None = None) -> bytes:
    return _relation(_ROOT, "a", "b", identity="f", xid=xid)


def _insert(oid: int = _ROOT, xid: int | None = None) -> bytes:
    return build.insert(build.row(build.null(), build.null()), oid=oid, xid=xid)


def _announced(*payloads: bytes, piece_bytes: int = 1 << 30) -> list[tuple[str, str]]:
    """Return identity and key columns of the root, as often as it is announced."""
    found = Assembler(piece_bytes).push([build.xlog_data(payload) for payload in payloads])
    for one in found:
        assert list(one.relations) == [change for change in one.changes if isinstance(change, Relation)]
    return [
        (each.replica_identity, "".join([column.name for column in each.columns if column.is_key]))
        for one in found
        for each in one.relations
        if each.oid == _ROOT
    ]


@pytest.mark.parametrize(
    ("partitions", "held"),
    [
        pytest.param([(_ONE, "ab", "f")], ("f", "ab"), id="full like the root"),
        pytest.param([(_ONE, "b", "d")], ("d", "b"), id="a key"),
        pytest.param([(_ONE, "ab", "d")], ("d", "ab"), id="a key of everything: most updates have no old row"),
        pytest.param([(_ONE, "a", "d"), (_TWO, "b", "i")], ("d", ""), id="other keys each"),
        pytest.param([(_ONE, "a", "d"), (_TWO, "ab", "f")], ("d", "a"), id="one of two"),
        pytest.param([(_ONE, "", "n"), (_TWO, "", "d")], ("f", "ab"), id="inserts alone"),
        pytest.param([(_ONE, "a", "d"), (_ONE, "ab", "f")], ("f", "ab"), id="full since"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1 << 30, 1])
def test_a_root_has_what_all_partitions_hold(
    partitions: list[tuple[int, str, str]], held: tuple[str, str], piece_bytes: int
) -> None:
    """Also in later transactions, with which the publisher announces no partition again."""
    payloads = []
    for oid, keys, identity in partitions:
        payloads += [build.begin(), _root(), _relation(oid, *keys, identity=identity), _insert(), build.commit()]
    last = _announced(*payloads, build.begin(), _root(), build.commit(), piece_bytes=piece_bytes)[-2:]
    assert last == [held, held]


def test_a_key_of_the_root_that_a_partition_has_not() -> None:
    """The old key of a partition with another index as its identity is without the root's key."""
    root = _relation(_ROOT, "a")
    assert _announced(build.begin(), root, _relation(_ONE, "b", identity="i"), _insert(), build.commit()) == [("d", "")]


def test_a_table_next_to_it_is_no_partition() -> None:
    """A TRUNCATE also announces several tables in a row."""
    frames = [build.begin(), _root(), _relation(_ONE, "b"), build.truncate(_ROOT, _ONE), _insert(), build.commit()]
    assert _announced(*frames) == [("f", "ab")]
    frames[3] = _insert(_ONE)
    assert _announced(*frames) == [("f", "ab")]


def test_inside_a_stream() -> None:
    """A transaction in progress announces for itself; what a partition holds is true for others as well."""
    streamed = [build.stream_start(), _root(700), _relation(_ONE, "b", xid=700), _insert(xid=700), build.stream_stop()]
    assert _announced(*streamed, build.begin(), _root(), build.commit()) == [("d", "b"), ("d", "b")]
