"""Types, how they compare, and literals, for `test_equality.py`."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from parapply.plan.table import Equality

if TYPE_CHECKING:
    from collections.abc import Iterable

INTS = ["{}", "{1,2}", "{1,NULL}", "{NULL,1}", "{NULL}", "{NULL,NULL}", "{12}", "{{1,2}}", "{{1},{2}}", "{1,2,3,4}",
         "{{1,2},{3,4}}", "[2:3]={1,2}", "[1:2]={1,2}", "[-1:0]={1,2}", "[0:0][1:2]={{1,2}}", "[1:1][1:2]={{1,2}}",
         "{0}", "{-0}", "{ 1 , 2 }", '{"1","2"}', "{{{1}}}", "{1}", "{{1}}", "{01}"]  # fmt: skip
TEXTS = ["", "a", "a ", " a", "A", "NULL", "null", "null ", "{}", "a,b", '"', '""', "\\", "\\\\", '\\"', "a\nb",
          "a\tb", "\u00e1", "a\u0301", "1.0", "1.00", "-0", "0", "'", "€😀", " ", "  ", "a  ",
         'a","A', "[1:1]={a}"]  # fmt: skip
NUMERICS = ["0", "-0", "0.0", "-0.00", "1", "1.0", "1.00", "01", "1e0", "10", "1e1", "10.0", "100", "-1", "-1.0",
             "NaN", "Infinity", "-Infinity", "0.10", "0.1", "0.01", "1e-5", "0.000010", "1.5", "1.50", "1.05", "1e20",
             "100000000000000000000.000", "0." + "0" * 40 + "10", "0." + "0" * 40 + "1", "9" * 60]  # fmt: skip
_FLOATS = ["0", "-0", "0.0", "-0.0", "1", "1.0", "NaN", "-NaN", "Infinity", "-Infinity", "0.1", "0.10", "1e-30",
           "-1e-30", "1e30", "1e15", "1000000000000000", "123456789", "1234567.0", "-1",
           "1e1", "10", "-10"]  # fmt: skip
_INTERVALS = ["0", "-0", "1 mon", "30 days", "720:00:00", "-1 mon", "-30 days", "1 mon -30 days", "-1 mon 720:00:00",
              "1 year", "12 mons", "360 days", "365 days", "1 day", "24:00:00", "23:59:59.999999",
              "1 day -00:00:00.000001", "00:00:00.000001", "-00:00:00.000001", "1 day 24:00:00", "2 days",
              "-1 day +48:00:00", "1 year 2 mons -3 days", "14 mons -3 days", "1 year 2 mons -3 days +04:05:06.7",
              "-1 year -2 mons +3 days -04:05:06.7", "-14 mons 3 days -04:05:06.700",
              "00:00:01.5", "00:00:01.000005", "1500 milliseconds", "178000000 years", "-178000000 years",
              "2147483647 days", "-2147483648 days", "2136000000 mons",
              "-2147483648 days 2147483647:59:59.999999",
              "1 year -1 mon", "11 mons", "-1 mons +1 day", "-29 days", "1 mon -1 day", "29 days"]  # fmt: skip
#: 17 and later. Near them are the largest finite ones.
INFINITE_INTERVALS = ["infinity", "-infinity", "178956970 years 7 mons 2147483647 days 2562047788:00:54.775806",
                       "-178956970 years -8 mons -2147483648 days -2562047788:00:54.775807"]  # fmt: skip
_JSON = ["1", "1.0", "1.00", "1e0", "10", "1e1", "10.0", "0", "-0", "0.0", "-0.00", "1.05", "1.050", "100", "[]", "{}",
         "[1]", "[1.0]", "[[1]]", "[[1.00]]", "[1, 2.50]", "[1.0,2.5]", "[2.5, 1]", "null", "[null]", "true", "false",
         '"1"', '"1.0"', '"1.00"', '["1.0", 1.0]', '["1.0", 1]', '["1.00", 1.0]', '{"a": 1.0}', '{"a":1}',
         '{"a": "1.0"}', '{"1.0": 1}', '{"1.00": 1}', '{"a":{"b":[1.10,{"c":2.0}]}}', '{"a":{"b":[1.1,{"c":2}]}}',
         '{"a":2.0,"a":1.0}',
         '{"b":1,"a":2.0}', '{"a":2,"b":1.0}', r'"\"1.0"', r'"\"1.00"', r'["\\", 1.0]', r'["\\", 1]', r'["\\\"", 1.0]',
         r'["\\\"",1]', r'"\u0041.0"', '"A.0"', '"a,1.0,b"', '"a,1,b"', '""', '{"": 0.0}', '{"":0}', '"\\n.0"',
         '"€ 1.0"', "0.00001000", "1e-5", '[".0", "", 3.0]', '["", 3.0]', "-1.50", "-1.5"]  # fmt: skip
_MOMENTS = ["2024-01-01", "2024-01-01 00:00:00", "2024-01-01 00:00:00.000001", "2024-01-02", "infinity", "-infinity",
            "0044-03-15 BC", "0044-03-15"]  # fmt: skip
_BRACKETS = ("[{},{}]", "[{},{})", "({},{}]", "({},{})")


def _ranges(*bounds: tuple[str, str]) -> list[str]:
    """Return ranges with all brackets, and the special ones."""
    special = ["empty", "(,)", "[,]"]
    return special + [brackets.format(*pair) for pair, brackets in product(bounds, _BRACKETS)]


def _multiranges(ranges: Iterable[str]) -> list[str]:
    """Return multiranges of none, one and two of some ranges, in both orders."""
    some = list(ranges)
    pairs = list(product(some[3:9], some[5:12]))
    return ["{}"] + [f"{{{one}}}" for one in some] + [f"{{{one},{other}}}" for one, other in pairs]


def arrays(elements: Iterable[str]) -> list[str]:
    """Return arrays of all shapes: elements alone, beside others, nested, with bounds; and quoted where need not be."""
    quoted = ['"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"' for element in elements]
    bounds = [f"[{low}:{low}]={{{one}}}" for low in (0, 1) for one in quoted[:8]]
    pairs = [f"{{{one},{other}}}" for one, other in product(quoted[:6], quoted[2:9])]
    nested = [f"{{{{{one}}},{{{other}}}}}" for one, other in product(quoted[:4], quoted[2:6])]
    return ["{}", "{NULL}", "{NULL,NULL}", "{{NULL}}"] + [f"{{{one}}}" for one in quoted] + bounds + pairs + nested


_NUMRANGES = _ranges(("1", "2"), ("1.0", "2.00"), ("1", "1.0"), ("", "2.0"), ("", "2"), ("1.50", ""), ("1.5", ""),
                     ("-Infinity", "1.0"), ("NaN", "NaN"), ("1e1", "20"), ("10.00", "20.0"))  # fmt: skip
_INTRANGES = _ranges(("1", "2"), ("1", "3"), ("0", "3"), ("", "3"), ("", "2"), ("1", ""), ("2", ""), ("3", "3"))
_DATERANGES = _ranges(("2024-01-01", "2024-01-02"), ("2023-12-31", "2024-01-02"), ("", "2024-01-02"),
                      ("2024-01-01", ""), ("-infinity", "2024-01-02"), ("2024-01-01", "infinity"),
                      ("infinity", "infinity"))  # fmt: skip
_TIMERANGES = [*_ranges(*product(_MOMENTS[:3], _MOMENTS[2:5])), *_ranges(("-infinity", ""), ("", "infinity"))]

#: Column type, class, literals: equal ones in several texts, and different ones that come near to each other.
CASES: list[tuple[str, Equality, list[str]]] = [
    ("int4", Equality.BYTES, ["0", "-0", "+0", "00", "1", "01", " 1", "1 ", "-1", "10", "100", "2147483647",
                              "-2147483648", "2", "3", "4", "5", "6", "7", "8"]),
    ("text", Equality.BYTES, TEXTS),
    ("timestamptz", Equality.BYTES, [*_MOMENTS, "2024-01-01 00:00:00+00", "2024-01-01 01:00:00+01",
                                     "2024-07-01 12:00+02", "2024-07-01 10:00Z", "2024-06-30 24:00:00+00", "2024-07-01",
                                     "2024-01-01 00:00:00.1", "2024-01-01 00:00:00.10", "0001-01-01",
                                     "294276-12-31 23:59:59.999999+00",
                                     "4714-11-24 00:00:00+00 BC", "2024-02-29", "2024-02-29 00:00 America/New_York"]),
    ("timetz", Equality.BYTES, ["12:00+00", "13:00+01", "12:00:00+00:00:00", "12:00-00:00:01", "24:00+00", "00:00+00",
                                "23:59:60+00", "12:00:00.0+00", "12:00:00.1+00", "11:00-01", "00:00:00+01",
                                "24:00:00+01", "00:00-12", "12:00+15:59", "12:00-15:59", "12:00:00.000001+00",
                                "01:00+01", "01:00Z", "00:30+01", "23:30+00"]),
    ("numeric", Equality.NUMERIC, NUMERICS),
    ("numeric(30,4)", Equality.NUMERIC, [text for text in NUMERICS if "Inf" not in text and len(text) < 26]),
    ("float4", Equality.FLOAT, _FLOATS),
    ("float8", Equality.FLOAT, _FLOATS),
    ("char(9)", Equality.BPCHAR, [text[:9] for text in TEXTS]),
    ("bpchar", Equality.BPCHAR, TEXTS),
    ("interval", Equality.INTERVAL, _INTERVALS),
    ("interval(2)", Equality.INTERVAL, _INTERVALS),
    ("interval day to minute", Equality.INTERVAL, _INTERVALS),
    ("jsonb", Equality.JSONB, _JSON),
    ("int2[]", Equality.BYTES, INTS),
    ("int4[]", Equality.BYTES, INTS),
    ("int8[]", Equality.BYTES, INTS),
    ("bool[]", Equality.BYTES, arrays(["t", "f", "true", "0", "yes", "off", "1", "no", "on"])),
    ("text[]", Equality.BYTES, arrays(TEXTS)),
    ("varchar(9)[]", Equality.BYTES, arrays([text[:9] for text in TEXTS])),
    ("name[]", Equality.BYTES, arrays(TEXTS)),
    ('"char"[]', Equality.BYTES, arrays(["", "a", "A", " ", ",", "{", '"', "\\", "é"])),
    ("bytea[]", Equality.BYTES, arrays(["", "\\x", "\\x00", "\\x0000", "\\x41", "A", "\\101", "\\xAb", "\\xab"])),
    ("uuid[]", Equality.BYTES, arrays(["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "A0EEBC999C0B4EF8BB6D6BB9BD380A11",
                                        "{a0eebc99-9c0b4ef8-bb6d6bb9-bd380a12}", "0" * 32])),
    ("date[]", Equality.BYTES, arrays(["2024-01-01", "20240101", "infinity", "-infinity", "0044-03-15 BC"])),
    ("time[]", Equality.BYTES, arrays(["00:00", "24:00:00", "00:00:00.0", "23:59:60", "12:00", "12:00 PM"])),
    ("timestamp[]", Equality.BYTES, arrays(_MOMENTS)),
    ("timestamptz(0)[]", Equality.BYTES, arrays(_MOMENTS)),
    ("inet[]", Equality.BYTES, arrays(["10.0.0.1", "10.0.0.1/32", "10.0.0.1/8", "10.0.0.0/8", "::1", "0::1/128"])),
    ("varbit[]", Equality.BYTES, arrays(["", "0", "00", "1", "10", "010", "B10", "x2"])),
    ("numeric[]", Equality.NUMBERS, arrays(NUMERICS)),
    ("float4[]", Equality.FLOAT_ARRAY, arrays(_FLOATS)),
    ("float8[]", Equality.FLOAT_ARRAY, arrays(_FLOATS)),
    ("char(9)[]", Equality.BPCHAR_ARRAY, arrays([text[:9] for text in TEXTS])),
    ("bpchar[]", Equality.BPCHAR_ARRAY, arrays(TEXTS)),
    ("interval[]", Equality.INTERVAL_ARRAY, arrays(_INTERVALS)),
    ("jsonb[]", Equality.JSONB_ARRAY, arrays(_JSON)),
    ("int4range", Equality.BYTES, _INTRANGES),
    ("int8range", Equality.BYTES, _INTRANGES),
    ("daterange", Equality.BYTES, _DATERANGES),
    ("tsrange", Equality.BYTES, _TIMERANGES),
    ("tstzrange", Equality.BYTES, _TIMERANGES),
    ("numrange", Equality.NUMBERS, _NUMRANGES),
    ("int4multirange", Equality.BYTES, _multiranges(_INTRANGES)),
    ("int8multirange", Equality.BYTES, _multiranges(_INTRANGES)),
    ("datemultirange", Equality.BYTES, _multiranges(_DATERANGES)),
    ("tsmultirange", Equality.BYTES, _multiranges(_TIMERANGES)),
    ("tstzmultirange", Equality.BYTES, _multiranges(_TIMERANGES)),
    ("nummultirange", Equality.NUMBERS, _multiranges(_NUMRANGES)),
    ("int4range[]", Equality.BYTES, arrays(_INTRANGES)),
    ("tstzrange[]", Equality.BYTES, arrays(_TIMERANGES)),
    ("numrange[]", Equality.NUMBERS, arrays(_NUMRANGES)),
    ("nummultirange[]", Equality.NUMBERS, arrays(_multiranges(_NUMRANGES)[:30])),
    ("public.spans", Equality.INTERVAL_ARRAY, arrays(_INTERVALS)),
    ("public.price", Equality.NUMBERS, _NUMRANGES),
    ("public.document", Equality.JSONB, _JSON),
]  # fmt: skip

TYPES = """
CREATE DOMAIN public.spans AS interval[]; CREATE DOMAIN public.price AS numrange;
CREATE DOMAIN public.document AS jsonb;
CREATE DOMAIN public.whole AS int; CREATE TYPE public.pair AS (x int, y numeric); CREATE TYPE public.mood AS ENUM ('a');
CREATE TYPE public.span AS RANGE (subtype = float8);
"""
#: Types not known to be exact count as unknown, whatever they are made of.
UNKNOWN = ["money", "money[]", "tsvector", "oidvector", "regclass", "public.pair", "public.pair[]", "public.mood[]",
           "public.whole[]", "public.span", "ext.ci", "ext.ci[]"]  # fmt: skip
