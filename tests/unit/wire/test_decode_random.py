"""The reference decoder, without a server: random messages, random bytes, mutated messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parapply.errors import ProtocolError
from parapply.model import Column, Relation
from parapply.wire.decode import decode
from parapply.wire.messages import (
    Begin,
    ColumnKind,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Prepare,
    RelationMessage,
    Truncate,
    TupleColumn,
    TupleData,
    Update,
)
from tests import build
from tests.unit.wire_cases import CASES, NULL, UNCHANGED

OIDS = st.integers(0, 2**32 - 1)
XIDS = st.none() | OIDS
LSNS = st.integers(0, 2**64 - 1)
TIMES_US = st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=63)
VALUES = st.binary(max_size=30)
ROWS = st.lists(
    st.sampled_from([NULL, UNCHANGED])
    | st.builds(TupleColumn, st.sampled_from([ColumnKind.TEXT, ColumnKind.BINARY]), VALUES),
    max_size=8,
).map(tuple)
COLUMNS = st.lists(
    st.builds(
        Column,
        name=NAMES,
        type_oid=OIDS,
        type_modifier=st.integers(-(2**31), 2**31 - 1),
        is_key=st.booleans(),
    ),
    max_size=6,
).map(tuple)


def _row_bytes(columns: TupleData) -> bytes:
    cells = []
    for kind, value in columns:
        if value is None:
            cells.append(build.null() if kind is ColumnKind.NULL else build.unchanged())
        else:
            cells.append(build.text(value) if kind is ColumnKind.TEXT else build.binary(value))
    return build.row(*cells)


@given(xid=XIDS, oid=OIDS, new=ROWS, before=st.none() | ROWS, is_key=st.booleans())
def test_changes_round_trip(
    xid: int | None, oid: int, new: TupleData, before: TupleData | None, *, is_key: bool
) -> None:
    """Any rows come back as they were sent, in the role they were sent in, inside and outside a stream."""
    in_stream = xid is not None
    key, old = (before, None) if is_key else (None, before)
    key_bytes = None if key is None else _row_bytes(key)
    old_bytes = None if old is None else _row_bytes(old)
    new_bytes = _row_bytes(new)
    insert = build.insert(new_bytes, oid=oid, xid=xid)
    assert decode(insert, in_stream=in_stream) == Insert(xid=xid, relation_oid=oid, new=new)
    update = build.update(new_bytes, key=key_bytes, old=old_bytes, oid=oid, xid=xid)
    assert decode(update, in_stream=in_stream) == Update(xid=xid, relation_oid=oid, key=key, old=old, new=new)
    if before is not None:
        delete = build.delete(key=key_bytes, old=old_bytes, oid=oid, xid=xid)
        assert decode(delete, in_stream=in_stream) == Delete(xid=xid, relation_oid=oid, key=key, old=old)


@given(xid=XIDS, oid=OIDS, schema=NAMES, name=NAMES, columns=COLUMNS, identity=st.sampled_from("dnfi"))
def test_relations_round_trip(
    xid: int | None, oid: int, *, schema: str, name: str, columns: tuple[Column, ...], identity: str
) -> None:
    """Any names, OIDs and modifiers come back as they were sent."""
    specs = [build.ColumnSpec(c.name, c.type_oid, c.type_modifier, int(c.is_key)) for c in columns]
    payload = build.relation(*specs, oid=oid, namespace=schema, name=name, replica_identity=identity, xid=xid)
    relation = Relation(oid=oid, schema=schema or "pg_catalog", name=name, replica_identity=identity, columns=columns)
    assert decode(payload, in_stream=xid is not None) == RelationMessage(xid=xid, relation=relation)


@given(lsn=LSNS, end_lsn=LSNS, time_us=TIMES_US, xid=OIDS, gid=NAMES)
def test_transaction_ends_round_trip(lsn: int, end_lsn: int, time_us: int, xid: int, gid: str) -> None:
    """LSNs and xids use all their bits without a sign, times with one, gids are any text."""
    assert decode(build.begin(final_lsn=lsn, commit_time_us=time_us, xid=xid)) == Begin(
        final_lsn=lsn, commit_time_us=time_us, xid=xid
    )
    assert decode(build.commit(commit_lsn=lsn, end_lsn=end_lsn, commit_time_us=time_us)) == Commit(
        commit_lsn=lsn, end_lsn=end_lsn, commit_time_us=time_us
    )
    payload = build.prepare(prepare_lsn=lsn, end_lsn=end_lsn, prepare_time_us=time_us, xid=xid, gid=gid)
    assert decode(payload) == Prepare(prepare_lsn=lsn, end_lsn=end_lsn, prepare_time_us=time_us, xid=xid, gid=gid)


@given(xid=XIDS, lsn=LSNS, prefix=NAMES, content=VALUES, oids=st.lists(OIDS, max_size=5), flags=st.integers(0, 3))
def test_messages_and_truncates_round_trip(
    xid: int | None, lsn: int, *, prefix: str, content: bytes, oids: list[int], flags: int
) -> None:
    """Prefix, contents and any number of relations come back as they were sent."""
    payload = build.message(flags=flags & 1, message_lsn=lsn, prefix=prefix, content=content, xid=xid)
    assert decode(payload, in_stream=xid is not None) == LogicalMessage(
        xid=xid, is_transactional=bool(flags & 1), message_lsn=lsn, prefix=prefix, content=content
    )
    assert decode(build.truncate(*oids, flags=flags, xid=xid), in_stream=xid is not None) == Truncate(
        xid=xid, cascade=bool(flags & 1), restart_identity=bool(flags & 2), relation_oids=tuple(oids)
    )


def _decode_or_protocol_error(payload: bytes, *, in_stream: bool, streaming_parallel: bool) -> None:
    outcome: Message | ProtocolError
    try:
        outcome = decode(payload, in_stream=in_stream, streaming_parallel=streaming_parallel)
    except ProtocolError as error:
        outcome = error
    if isinstance(outcome, ProtocolError):
        assert 0 <= outcome.offset <= len(payload)
        assert outcome.kind == (chr(payload[0]) if payload else "")
    else:
        assert isinstance(outcome, Message)


@given(
    kind=st.sampled_from(sorted(b"BCORYIUDTMSEcAbPKrp")) | st.integers(0, 255),
    body=st.binary(max_size=80),
    in_stream=st.booleans(),
    streaming_parallel=st.booleans(),
)
def test_random_bytes_are_a_message_or_a_protocol_error(
    kind: int, body: bytes, *, in_stream: bool, streaming_parallel: bool
) -> None:
    """No bytes raise anything but ProtocolError, whose offset lies within them."""
    payload = bytes([kind]) + body
    _decode_or_protocol_error(payload, in_stream=in_stream, streaming_parallel=streaming_parallel)
    _decode_or_protocol_error(body, in_stream=in_stream, streaming_parallel=streaming_parallel)


@given(data=st.data(), case=st.sampled_from(sorted(CASES)), in_stream=st.booleans(), streaming_parallel=st.booleans())
def test_mutated_messages_are_a_message_or_a_protocol_error(
    data: st.DataObject, case: str, *, in_stream: bool, streaming_parallel: bool
) -> None:
    """A valid message with bytes changed, cut out or put in raises nothing but ProtocolError."""
    payload = bytearray(CASES[case].payload)
    for _ in range(data.draw(st.integers(1, 4), label="mutations")):
        start = data.draw(st.integers(0, len(payload)), label="start")
        size = data.draw(st.integers(0, 4), label="replaced")
        payload[start : start + size] = data.draw(st.binary(max_size=4), label="replacement")
    _decode_or_protocol_error(bytes(payload), in_stream=in_stream, streaming_parallel=streaming_parallel)
