"""Values of one type, each replaced by another one of the same type, and frames whose values are replaced. Pure.

Text keeps its length and its marks, a number its number of digits and its sign, a time stays a time. Values of a type
that is not known here become NULL where the column may be NULL, and else the table is refused by name.

Source: output functions of each type, under the settings of a replication session (`source/options.py`).
"""

from __future__ import annotations

import json
import re
import struct
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from parapply.capture.blocks import KIND
from parapply.errors import CaptureRefused, ProtocolError
from parapply.model import FRAME_HEADER_BYTES
from parapply.wire.decode import decode
from parapply.wire.messages import (
    BeginPrepare,
    ColumnKind,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Prepare,
    RollbackPrepared,
    StreamPrepare,
    TupleColumn,
    Update,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from parapply.capture.blocks import CapturedTable, CapturedType
    from parapply.capture.permute import Permutation
    from parapply.wire.messages import TupleData

    Replace: TypeAlias = Callable[[str], str]

_WHOLE: Final = re.compile(r"-?[0-9]+")
_NUMBER: Final = re.compile(r"(-?)([0-9]+)(?:\.([0-9]+))?")
_FLOAT: Final = re.compile(r"(-?[0-9])([0-9]*)(?:\.([0-9]+))?(e[+-]?[0-9]+)?")
_DATE: Final = re.compile(r"(?<![0-9])([0-9]{4})-([0-9]{2})-([0-9]{2})(?=$| )")
_TIME: Final = re.compile(r"(?<![0-9:+-])([01][0-9]|2[0-3]):([0-9]{2}):([0-9]{2})(?:\.([0-9]+))?")
_INTERVAL: Final = re.compile(r"(?P<count>[0-9]+)(?= (?:year|mon|day))|(?P<hours>[0-9]+):(?P<rest>[0-9]{2}:[0-9]{2})")
_JSON: Final = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9]+(?:\.[0-9]+)?')
_ITEM: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^{},"]+)|[{},]', re.DOTALL)
_BOUNDS: Final = re.compile(r"(?:\[-?[0-9]+:-?[0-9]+\])+=")
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
#: First and last year of ranges of dates: each day is replaced by one of the same range.
_YEARS: Final = ((1, 1899), (1900, 2099), (2100, 9999))
_DAY_S: Final = 86_400
#: More years or days than these could leave an interval's range.
_MOST_COUNT: Final = 999_999
_COUNT: Final = struct.Struct(">H")
_LENGTH: Final = struct.Struct(">I")
#: Largest values of float4 and float8; another digit could leave their range.
_MOST_FLOATS: Final = {700: 3.4e38, 701: 1.79e308}


class ValueReplacement:
    """Replaces values by their type."""

    def __init__(self, permutation: Permutation) -> None:
        self._by = permutation
        #: By OIDs of PostgreSQL's own types. (pg_type.dat)
        self._known: dict[int, Replace] = {
            **dict.fromkeys((25, 1043, 1042, 19), permutation.text),  # text, varchar, bpchar, name
            18: self._one_char,
            **dict.fromkeys((20, 21, 23, 26), self.whole),  # int8, int2, int4, oid
            1700: self.numeric,
            **{oid: partial(self.float, most) for oid, most in _MOST_FLOATS.items()},
            16: self._bool,
            17: self._bytea,
            2950: permutation.hexadecimal,  # uuid
            **dict.fromkeys((829, 774), permutation.hexadecimal),  # macaddr, macaddr8
            **dict.fromkeys((1560, 1562), permutation.bits),  # bit, varbit
            **dict.fromkeys((1082, 1083, 1114, 1184, 1266), self.time),  # date, time, timestamp, timestamptz, timetz
            1186: self.interval,
            **dict.fromkeys((114, 3802), self.json),
        }

    def of(self, oid: int, types: Mapping[int, CapturedType]) -> Replace | None:
        """Return the replacement of a type's values; None: it is not known."""
        found = self._known.get(oid)
        one = types.get(oid)
        if found is not None or one is None:
            return found
        if one.kind == "d":
            return self.of(one.base, types)
        if one.kind == "e":
            return self._enum(one)
        inner = self.of(one.element, types) if one.element else None
        return None if inner is None else lambda text: _array(text, inner)

    def whole(self, text: str) -> str:
        """Return the replacement of an integer."""
        return str(self._by.integer(int(text))) if _WHOLE.fullmatch(text) else text

    def numeric(self, text: str) -> str:
        """Return the replacement of a number without an exponent."""
        found = _NUMBER.fullmatch(text)
        if found is None:
            return text
        sign, whole, fraction = found.groups()
        behind = f".{self._by.fraction(fraction)}" if fraction else ""
        return f"{sign}{self._by.integer(int(whole))}{behind}"

    def float(self, most: float, text: str) -> str:
        """Return the replacement of a float up to a largest one: its first digit and its exponent stay."""
        found = _FLOAT.fullmatch(text)
        if found is None:
            return text
        first, digits, fraction, exponent = found.groups()
        behind = f".{self._by.fraction(fraction)}" if fraction else ""
        replaced = f"{first}{self._by.text(digits)}{behind}{exponent or ''}"
        return replaced if abs(float(replaced)) <= most else f"{first}{exponent or ''}"

    def _bool(self, text: str) -> str:
        return "ft"[self._by.within("bool", int(text == "t"), 2)] if text in ("t", "f") else text

    def _bytea(self, text: str) -> str:
        return text[:2] + self._by.hexadecimal(text[2:])

    def _one_char(self, text: str) -> str:
        # Others are shown by their octal number.
        return self._by.text(text) if len(text) == 1 and text.isascii() else text

    def time(self, text: str) -> str:
        """Return the replacement of a date, of a time of a day, or of both; years of five digits and BC stay."""
        if text.endswith(" BC"):
            return text
        return _TIME.sub(self._time_of_day, _DATE.sub(self._day, text))

    def _day(self, found: re.Match[str]) -> str:
        year, month, day = map(int, found.groups())
        if not year:
            return found[0]
        first, last = next(span for span in _YEARS if year <= span[1])
        begin = date(first, 1, 1).toordinal()
        size = date(last, 12, 31).toordinal() - begin + 1
        number = date(year, month, day).toordinal() - begin
        return date.fromordinal(begin + self._by.within("day", number, size)).isoformat()

    def _time_of_day(self, found: re.Match[str]) -> str:
        hours, minutes, seconds, fraction = found.groups()
        number = (int(hours) * 60 + int(minutes)) * 60 + int(seconds)
        if number >= _DAY_S or int(minutes) > 59 or int(seconds) > 59:
            return found[0]
        number = self._by.within("second", number, _DAY_S)
        behind = f".{self._by.fraction(fraction)}" if fraction else ""
        return f"{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}{behind}"

    def interval(self, text: str) -> str:
        """Return the replacement of an interval of IntervalStyle postgres; its fraction of a second stays."""

        def part(found: re.Match[str]) -> str:
            count = int(found["count"] or found["hours"])
            count = self._by.integer(count) if count <= _MOST_COUNT else count
            if found["count"]:
                return str(count)
            minutes, seconds = map(int, found["rest"].split(":"))
            number = self._by.within("minute", minutes * 60 + seconds, 3600) if minutes < 60 > seconds else 0
            return f"{count:02}:{number // 60:02}:{number % 60:02}"

        return _INTERVAL.sub(part, text)

    def json(self, text: str) -> str:
        """Return the replacement of a JSON: keys, strings and numbers are replaced, its form stays."""
        return _JSON.sub(lambda found: self._json_part(found[0]), text)

    def _json_part(self, part: str) -> str:
        if not part.startswith('"'):
            return self.numeric(part)
        # A lone surrogate, which only the type json allows, has no UTF-8.
        said = str(json.loads(part, strict=False)).encode("utf-8", "replace").decode()
        return json.dumps(self._by.text(said), ensure_ascii=False)

    def _enum(self, one: CapturedType) -> Replace:
        labels = one.labels
        numbers = {label: number for number, label in enumerate(labels)}
        tag = f"enum {one.schema}.{one.name}"

        def replaced(text: str) -> str:
            # One that was added since is replaced when its type is read again.
            return labels[self._by.within(tag, numbers.get(text, 0), len(labels))]

        return replaced


def _array(text: str, inner: Replace) -> str:
    """Return an array's text with its elements replaced; bounds stay."""
    bounds = _BOUNDS.match(text)
    begin = bounds.end() if bounds else 0

    def item(found: re.Match[str]) -> str:
        quoted, plain = found.groups()
        if plain == "NULL" or (quoted is None and plain is None):
            return found[0]
        value = plain if quoted is None else _ESCAPED.sub(r"\1", quoted)
        escaped = inner(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'

    return text[:begin] + _ITEM.sub(item, text[begin:])


class FrameReplacement:
    """Replaces the values in frames. Knows the tables that were announced last."""

    def __init__(self, permutation: Permutation) -> None:
        self._by = permutation
        self._values = ValueReplacement(permutation)
        #: By the table's OID, for each column: its replacement; None: NULL.
        self._tables: dict[int, tuple[Replace | None, ...]] = {}

    def missing(self, oid: int, text: str | None, types: Mapping[int, CapturedType]) -> str | None:
        """Return the replacement of a value that rows have from before a column was added."""
        replace = None if text is None else self._values.of(oid, types)
        return None if replace is None or text is None else replace(text)

    def announce(self, table: CapturedTable, types: Mapping[int, CapturedType]) -> None:
        """Take the columns of a table as the stream announces them.

        Raises:
            CaptureRefused: a column cannot be replaced, and may not be NULL.
        """
        keys = {name for index in table.indexes if index.is_primary or index.is_identity for name in index.columns}
        found = []
        for column in table.columns:
            replace = self._values.of(column.type_oid, types)
            if replace is None and (column.is_not_null or column.name in keys):
                one = types.get(column.type_oid)
                name = f"{one.schema}.{one.name}" if one is not None else f"with OID {column.type_oid}"
                raise CaptureRefused(
                    f"{table.schema}.{table.name}: column {column.name!r} is of type {name}, whose values cannot be"
                    " replaced, and it may not be NULL",
                    hint="leave the table or the column out of the publication of the capture",
                )
            found.append(replace)
        self._tables[table.oid] = tuple(found)

    def replaced(self, frame: bytes, *, in_stream: bool) -> bytes:
        """Return a frame with its values replaced; one without values as it is.

        Raises:
            ProtocolError: it cannot be read.
        """
        kind = frame[KIND]
        if kind not in _WITH_VALUES:
            return frame
        message = decode(frame[FRAME_HEADER_BYTES:], in_stream=in_stream)
        if isinstance(message, BeginPrepare | Prepare | CommitPrepared | RollbackPrepared | StreamPrepare):
            gid = message.gid.encode()
            return frame[: -len(gid) - 1] + self._by.text(message.gid).encode() + b"\0"
        if isinstance(message, LogicalMessage):
            raise ProtocolError("M", 0, "this message was not asked for")
        assert isinstance(message, Insert | Update | Delete), "its first byte says so"
        xid_bytes = 4 if in_stream else 0
        begin = FRAME_HEADER_BYTES + 1 + xid_bytes + 4
        columns = self._tables.get(message.relation_oid)
        if columns is None:
            raise ProtocolError(kind.decode(), 1, f"relation {message.relation_oid} was not announced")
        parts = [frame[:begin]]
        for mark, data in _tuples(message):
            parts += [mark, self._tuple(data, columns)]
        return b"".join(parts)

    def _tuple(self, data: TupleData, columns: tuple[Replace | None, ...]) -> bytes:
        if len(data) != len(columns):
            raise ProtocolError("", 0, f"a row has {len(data)} columns, its relation {len(columns)}")
        pairs = zip(data, columns, strict=True)
        return _COUNT.pack(len(data)) + b"".join([_column(one, replace) for one, replace in pairs])


_WITH_VALUES: Final = frozenset({b"I", b"U", b"D", b"M", b"b", b"P", b"K", b"r", b"p"})


def _tuples(message: Insert | Update | Delete) -> list[tuple[bytes, TupleData]]:
    before = [] if isinstance(message, Insert) else [(b"K", message.key), (b"O", message.old)]
    after = [] if isinstance(message, Delete) else [(b"N", message.new)]
    return [(mark, data) for mark, data in [*before, *after] if data is not None]


def _column(one: TupleColumn, replace: Replace | None) -> bytes:
    if one.kind is ColumnKind.UNCHANGED:
        return b"u"
    if one.kind is ColumnKind.NULL or replace is None:
        return b"n"
    if one.kind is not ColumnKind.TEXT or one.value is None:
        raise ProtocolError("", 0, "a value in binary was not asked for")
    # A publisher in SQL_ASCII may send bytes that are no UTF-8 (T-61).
    value = replace(one.value.decode("utf-8", "replace")).encode()
    return b"t" + _LENGTH.pack(len(value)) + value
