"""The reference decoder, without a server: layouts and refusals."""

from __future__ import annotations

import pytest

from parapply.errors import ProtocolError
from parapply.wire.decode import decode
from parapply.wire.messages import (
    Insert,
    Message,
    RelationMessage,
    TypeMessage,
)
from tests import build
from tests.unit.wire_cases import CASES, Case

every_message = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def test_the_cases_hold_every_message() -> None:
    """No message type escapes the rules below."""
    assert {type(case.expected) for case in CASES.values()} == set(Message.__args__)
    assert {chr(case.payload[0]) for case in CASES.values()} == set("BCORYIUDTMSEcAbPKrp")


@every_message
def test_message_is_decoded(case: Case) -> None:
    """The documented bytes give the message, field by field; LSNs, OIDs and xids are unsigned, times signed."""
    assert case.read(case.payload) == case.expected


@every_message
def test_message_is_frozen_and_slotted(case: Case) -> None:
    """A message cannot be changed after it was decoded."""
    assert not hasattr(case.expected, "__dict__")
    for name in case.expected.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(case.expected, name, None)


@every_message
def test_every_truncation_is_refused(case: Case) -> None:
    """A message cut at any length raises ProtocolError with its kind and an offset inside the bytes given."""
    for size in range(len(case.payload)):
        with pytest.raises(ProtocolError) as caught:
            case.read(case.payload[:size])
        assert caught.value.kind == (chr(case.payload[0]) if size else "")
        assert 0 <= caught.value.offset <= size


@every_message
@pytest.mark.parametrize("extra", [b"\0", b"n", b"\xff\xff\xff\xff"], ids=["zero", "n", "ff"])
def test_trailing_bytes_are_refused(case: Case, extra: bytes) -> None:
    """Nothing may follow a message: the offset is where it should have ended."""
    with pytest.raises(ProtocolError, match="follow the end") as caught:
        case.read(case.payload + extra)
    assert caught.value.offset == len(case.payload)


def test_an_unknown_type_byte_is_refused() -> None:
    """Every byte that is not a message type of protocol 1 to 4 is named in the error, at offset 0."""
    for byte in set(range(256)) - set(b"BCORYIUDTMSEcAbPKrp"):
        for in_stream in (False, True):
            with pytest.raises(ProtocolError, match="unknown message type") as caught:
                decode(bytes([byte]) + bytes(30), in_stream=in_stream)
            assert (caught.value.kind, caught.value.offset) == (chr(byte), 0)


RESERVED_FLAGS = {
    "commit": (build.commit(flags=1), 1),
    "stream commit": (build.stream_commit(flags=128), 5),
    "prepare": (build.prepare(flags=1), 1),
    "stream prepare": (build.stream_prepare(flags=1), 1),
    "commit prepared": (build.commit_prepared(flags=255), 1),
    "rollback prepared": (build.rollback_prepared(flags=1), 1),
    "truncate": (build.truncate(1, flags=4), 5),
    "message": (build.message(flags=2), 1),
    "stream start": (build.stream_start(first_segment=2), 5),
    "relation column": (build.relation(build.ColumnSpec("c", flags=2), namespace="", name=""), 10),
}


@pytest.mark.parametrize(("payload", "offset"), RESERVED_FLAGS.values(), ids=RESERVED_FLAGS.keys())
def test_flags_without_a_meaning_are_refused(payload: bytes, offset: int) -> None:
    """A flag that must be 0, or has no meaning in protocol 1 to 4, is never ignored."""
    with pytest.raises(ProtocolError, match="only 0x") as caught:
        decode(payload)
    assert caught.value.offset == offset


MINUS_ONE_16, MINUS_ONE_32 = b"\xff\xff", b"\xff\xff\xff\xff"
NEGATIVE = {
    "columns of a row": (b"I\0\0\0\1N" + MINUS_ONE_16, 6),
    "columns of a key": (b"D\0\0\0\1K" + MINUS_ONE_16, 6),
    "columns of a relation": (b"R\0\0\0\1s\0t\0d" + MINUS_ONE_16, 10),
    "length of a text value": (b"I\0\0\0\1N\0\1t" + MINUS_ONE_32, 9),
    "length of a binary value": (b"I\0\0\0\1N\0\1b\x80\0\0\0", 9),
    "relations of a truncate": (b"T" + MINUS_ONE_32 + b"\0", 1),
    "length of a message": (b"M\0" + bytes(8) + b"p\0" + MINUS_ONE_32, 12),
}


@pytest.mark.parametrize(("payload", "offset"), NEGATIVE.values(), ids=NEGATIVE.keys())
def test_negative_lengths_and_counts_are_refused(payload: bytes, offset: int) -> None:
    """Lengths and counts are signed on the wire; a negative one is neither NULL nor a large number."""
    with pytest.raises(ProtocolError, match="negative") as caught:
        decode(payload + bytes(16))
    assert caught.value.offset == offset


WRONG_KIND = {
    "column kind": (b"I\0\0\0\1N\0\1x", 8),
    "insert without N": (b"I\0\0\0\1K\0\0", 5),
    "update with another kind": (b"U\0\0\0\1X\0\0", 5),
    "update with two old rows": (b"U\0\0\0\1K\0\0O\0\0", 8),
    "update without new row": (b"U\0\0\0\1O\0\0K\0\0", 8),
    "delete with a new row": (b"D\0\0\0\1N\0\0", 5),
    "replica identity": (b"R\0\0\0\1s\0t\0x\0\0", 9),
}


@pytest.mark.parametrize(("payload", "offset"), WRONG_KIND.values(), ids=WRONG_KIND.keys())
def test_unknown_kinds_are_refused(payload: bytes, offset: int) -> None:
    """A tuple, column or replica identity of an unknown kind is never guessed at."""
    with pytest.raises(ProtocolError, match="not one of") as caught:
        decode(payload)
    assert caught.value.offset == offset


BAD = b"a\xffb\0"
NOT_UTF8 = {
    "namespace": (b"R\0\0\0\1" + BAD + b"t\0d\0\0", 6),
    "relation name": (b"R\0\0\0\1s\0" + BAD + b"d\0\0", 8),
    "column name": (b"R\0\0\0\1s\0t\0d\0\1\0" + BAD + bytes(8), 14),
    "type name": (b"Y\0\0\0\1s\0" + BAD, 8),
    "origin name": (b"O" + bytes(8) + BAD, 10),
    "prefix": (b"M\0" + bytes(8) + BAD + bytes(4), 11),
    "gid": (b"b" + bytes(28) + BAD, 30),
    # Surrogates are not UTF-8, though some decoders let them pass.
    "surrogate": (b"Y\0\0\0\1s\0\xed\xa0\x80\0", 7),
}


@pytest.mark.parametrize(("payload", "offset"), NOT_UTF8.values(), ids=NOT_UTF8.keys())
def test_names_that_are_not_utf8_are_refused(payload: bytes, offset: int) -> None:
    """A name is UTF-8 or an error at its first wrong byte; a changed name could match another table."""
    with pytest.raises(ProtocolError, match="is not UTF-8") as caught:
        decode(payload)
    assert caught.value.offset == offset


@pytest.mark.parametrize(
    ("payload", "offset"),
    [(build.origin(name="abc")[:-1], 9), (build.prepare(gid="abc")[:-1], 30), (build.relation(name="abc")[:15], 12)],
    ids=["origin", "prepare", "relation"],
)
def test_a_string_without_its_zero_byte_is_refused(payload: bytes, offset: int) -> None:
    """A string never ends where the message does: the offset is where it began."""
    with pytest.raises(ProtocolError, match="no terminating zero byte") as caught:
        decode(payload)
    assert caught.value.offset == offset


def test_values_stay_bytes() -> None:
    """A row's values are not text to the decoder: any bytes pass unchanged, zeros and wrong UTF-8 included."""
    value = bytes(range(256))
    decoded = decode(build.insert(build.row(build.text(value), build.binary(value))))
    assert isinstance(decoded, Insert)
    assert [column.value for column in decoded.new] == [value, value]


@pytest.mark.parametrize("identity", "dnfi")
def test_relation_replica_identities(identity: str) -> None:
    """All four replica identities are known."""
    decoded = decode(build.relation(build.ColumnSpec("a"), replica_identity=identity))
    assert isinstance(decoded, RelationMessage)
    assert decoded.relation.replica_identity == identity


def test_an_empty_namespace_is_pg_catalog() -> None:
    """The schema is never empty, in relations as in types."""
    relation = decode(build.relation(namespace="", name="t"))
    assert isinstance(relation, RelationMessage)
    assert relation.relation.qualified_name == "pg_catalog.t"
    type_message = decode(build.type_(namespace=""))
    assert isinstance(type_message, TypeMessage)
    assert type_message.schema == "pg_catalog"


def test_a_relation_can_be_without_columns() -> None:
    """A table without columns is a table (trap T-67)."""
    decoded = decode(build.relation())
    assert isinstance(decoded, RelationMessage)
    assert decoded.relation.columns == ()


def test_equal_columns_of_two_relations_are_one_object() -> None:
    """Thousands of tables of one shape are read and kept once, each under its own name."""
    specs = [build.ColumnSpec("id", flags=1), build.ColumnSpec("note")]
    one, other = (decode(build.relation(*specs, oid=oid)) for oid in (5, 6))
    assert isinstance(one, RelationMessage)
    assert isinstance(other, RelationMessage)
    assert (one.relation.oid, other.relation.oid) == (5, 6)
    assert other.relation.columns is one.relation.columns


def test_a_wide_relation() -> None:
    """The widest table PostgreSQL allows is decoded in order."""
    specs = [build.ColumnSpec(f"c{number}", flags=number % 2) for number in range(1600)]
    decoded = decode(build.relation(*specs))
    assert isinstance(decoded, RelationMessage)
    assert [(column.name, int(column.is_key)) for column in decoded.relation.columns] == [
        (spec.name, spec.flags) for spec in specs
    ]


def test_a_huge_count_costs_nothing() -> None:
    """A count is believed only as far as bytes follow: 2^31-1 relations or bytes fail at once."""
    most = b"\x7f\xff\xff\xff"
    for payload in (b"T" + most + b"\0" + bytes(8), b"I\0\0\0\1N\0\1t" + most + b"x"):
        with pytest.raises(ProtocolError, match="are left"):
            decode(payload)
