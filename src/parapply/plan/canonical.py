"""Canonical texts of types whose equal values print differently (trap T-21). Pure.

In: a value's text as the publisher prints it under its pinned settings. Out: bytes that are the same exactly when
PostgreSQL's default btree operator class holds two values of the type equal; never to be sent to a server. It must be
exact both ways, because net changes are kept by it: one missed pair loses a row, and one pair too many merges two rows.

Source: PostgreSQL's ``array_out`` and ``array_cmp``, ``range_out`` and ``range_cmp``, ``EncodeInterval`` and
``interval_cmp_value``, ``jsonb_out`` and ``compareJsonbContainers``; each is compared in the integration tests.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from parapply.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

_DAYS_PER_MONTH = 30  # interval_cmp_value, whatever the calendar says
_SECONDS_PER_DAY = 86400

# IntervalStyle 'postgres': every field has a sign of its own, the time's counts for all of its parts.
_MORE = rb"(?: (?=.)|\Z)"
_INTERVAL: Final = re.compile(
    rb"(?=.)(?:([+-]?\d+) years?"
    + _MORE
    + rb")?(?:([+-]?\d+) mons?"
    + _MORE
    + rb")?(?:([+-]?\d+) days?"
    + _MORE
    + rb")?"
    rb"(?:([+-]?)(\d+):(\d\d):(\d\d)(?:\.(\d{1,6}))?)?"
)
_INFINITE: Final = (b"infinity", b"-infinity")

_FRACTION: Final = re.compile(rb"\.\d+")
_STRING_OR_FRACTION: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|\.\d+', re.DOTALL)

# A quoted element, or one that needs no quotes: NULL is null only as the latter.
_ELEMENT: Final = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"|[^{},"]+', re.DOTALL)
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)
_SPECIAL: Final = re.compile(rb'(["\\])')


def numbers(text: bytes) -> bytes:
    """Strip the scale of every numeric in a text without strings: an array, a range, a multirange, or arrays of those.

    Quotes around elements and bounds do not depend on the digits, and numeric prints neither exponents nor -0.
    """
    return _FRACTION.sub(_without_scale, text) if b"." in text else text


def jsonb(text: bytes) -> bytes:
    """Strip the scale of the numbers, and of nothing inside strings.

    All else has one text: keys are sorted and unique, strings compare by bytes (the database's collation is always
    deterministic), and numbers are numerics.
    """
    return _STRING_OR_FRACTION.sub(_without_scale, text) if b"." in text else text


def _without_scale(match: re.Match[bytes]) -> bytes:
    found = match[0]
    return found.rstrip(b"0").rstrip(b".") if found.startswith(b".") else found


def interval(text: bytes) -> bytes:
    """Return the microseconds in all, a month having 30 days and a day 24 hours; infinities are themselves.

    Raises:
        ProtocolError: the text is not in the pinned style. It is not part of the error: it is a row's value.
    """
    if text in _INFINITE:
        return text
    found = _INTERVAL.fullmatch(text)
    if found is None:
        raise ProtocolError("", 0, "an interval is not printed in IntervalStyle postgres, which was asked for")
    years, months, days, sign, hours, minutes, seconds, fraction = found.groups(b"0")
    time_us = (int(hours) * 3600 + int(minutes) * 60 + int(seconds)) * 1_000_000 + int(fraction.ljust(6, b"0"))
    all_days = (int(years) * 12 + int(months)) * _DAYS_PER_MONTH + int(days)
    return b"%d" % (all_days * _SECONDS_PER_DAY * 1_000_000 + (-time_us if sign == b"-" else time_us))


def floating(text: bytes) -> bytes:
    """-0 and 0 are one value, NaN equals itself; every other value has one shortest text."""
    return b"0" if text == b"-0" else text


def unpadded(text: bytes) -> bytes:
    """Return a char(n) without its trailing blanks, which do not count."""
    return text.rstrip(b" ")


def array_of(form: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Return the form of arrays whose elements have this one; the delimiter is a comma.

    Bounds and nesting count and stay; every element is quoted, because whether it was depends on its text. The function
    returned raises ProtocolError if the text is no array.
    """

    def element(match: re.Match[bytes]) -> bytes:
        quoted = match[1]
        if quoted is None and match[0] == b"NULL":
            return b"NULL"
        found = match[0] if quoted is None else _ESCAPED.sub(rb"\1", quoted)
        return b'"' + _SPECIAL.sub(rb"\\\1", form(found)) + b'"'

    def array(text: bytes) -> bytes:
        # '[2:3]={7,8}': lower bounds that are not 1 are printed, and hold no element.
        start = text.find(b"{")
        if start < 0:
            raise ProtocolError("", 0, "an array is not printed in braces")
        return text[:start] + _ELEMENT.sub(element, text[start:])

    return array
