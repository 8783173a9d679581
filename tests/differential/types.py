"""The types that random columns have, with small sets of values for each.

In goes nothing; out comes one table of types. Sets are small, so that transactions meet on the same keys; many hold
values that are equal without looking equal (`1.0` and `1.00`), look alike without being equal, or are odd to quote.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    Values = Callable[[random.Random], str]


class Feature(StrEnum):
    """Features that a server may lack; a type that needs one is drawn only where both servers have it."""

    CITEXT = "citext"
    HSTORE = "hstore"
    ICU = "icu"


#: Made on both sides before the tables.
COMMON_SQL: Final = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE TYPE point2 AS (x int, y text);
CREATE DOMAIN short_text AS varchar(12) CHECK (VALUE <> 'never');
CREATE DOMAIN rounded AS numeric(8,2);
CREATE DOMAIN some_ints AS int[];
CREATE DOMAIN span AS int4range;
CREATE DOMAIN place AS point2;
CREATE DOMAIN mood_domain AS mood;
"""
_FEATURE_SQL: Final = {
    Feature.CITEXT: "CREATE EXTENSION citext;\n",
    Feature.HSTORE: "CREATE EXTENSION hstore;\n",
    Feature.ICU: "CREATE COLLATION caseless (provider = icu, locale = 'und-u-ks-level2', deterministic = false);\n"
    "CREATE COLLATION accentless (provider = icu, locale = 'und-u-ks-level1', deterministic = false);\n",
}


def types_sql(features: frozenset[Feature]) -> str:
    """Return the statements that make the types of servers with these features."""
    return "".join(_FEATURE_SQL[feature] for feature in sorted(features)) + COMMON_SQL


@dataclass(frozen=True, kw_only=True)
class RandomType:
    """A type and its values.

    Attributes:
        name: in SQL, with its modifier and collation.
        values: of a column.
        spare: a value that `values` never gives, through which two rows swap theirs; empty where there is none.
        others: types that a target's column may have instead; they take the text that the publisher sends.
        is_exact: equal values have equal texts.
        is_key: has an order for a primary key.
        is_comparable: has an equality that a subscription can find a row by.
        needs: a feature of both servers.
        compared_as: type that a condition casts to; empty for none.
    """

    name: str
    values: Values
    spare: str = ""
    others: tuple[str, ...] = ()
    is_exact: bool = True
    is_key: bool = True
    is_comparable: bool = True
    needs: Feature | None = None
    compared_as: str = ""


def of(*values: str) -> Values:
    """Return a choice among texts."""
    return lambda chooser: chooser.choice(values)


def number(first: int, count: int) -> Values:
    """Return a choice among consecutive integers."""
    return lambda chooser: str(first + chooser.randrange(count))


def pattern(text: str, count: int) -> Values:
    """Return a choice among a text with `{n}` as each number below `count`."""
    return lambda chooser: text.format(n=chooser.randrange(count))


def mixed(pattern_text: str, count: int, *odd: str) -> Values:
    """Return a choice that is one of a few odd values every third time, else of a pattern."""
    usual = pattern(pattern_text, count)
    return lambda chooser: chooser.choice(odd) if chooser.random() < 0.3 else usual(chooser)


_TEXTS = ("a", "A", "a ", " a", "", "NULL", "o'k", 'say "x"', "back\\slash", "100%s", "{b}", "ä߀", "tab\there", "(c,d)")
_NUMBERS = (
    "0",
    "-0.0",
    "1",
    "1.0",
    "1.00",
    "2.5",
    "2.50",
    "1000",
    "1e3",
    "-7",
    "-7.000",
    "NaN",
    "Infinity",
    "-Infinity",
)
_FLOATS = ("0", "-0", "NaN", "1e-300", "0.1", "Infinity", "-Infinity", "1", "-2.5", "100")
_CASES = ("a", "A", "b", "B", "Straße", "STRASSE", "é", "E", "e\u0301", "x y", "X Y", "")
_SPANS = ("1 mon", "30 days", "720 hours", "-1 day 02:03:04", "1 day", "24:00:00", "1 year", "12 mons", "0", "00:00:01")

_ALL: Final = (
    RandomType(name="int", values=number(-5, 40), spare="-1000", others=("bigint", "numeric", "text")),
    RandomType(name="bigint", values=number(2**40, 40), spare="-1", others=("numeric",)),
    RandomType(name="smallint", values=number(-3, 30), spare="-1000", others=("int", "bigint")),
    RandomType(name="text", values=of(*_TEXTS), spare="spare", others=("varchar",)),
    RandomType(name='text COLLATE "C"', values=of(*_TEXTS), spare="spare"),
    RandomType(name="varchar(12)", values=of("", "x", "X", "twelve chars", "x ", "%"), spare="spare", others=("text",)),
    RandomType(name="char(6)", values=of("a", "a ", "b", "bb", "bb  ", "", " c", "sixsix"), spare="spare"),
    RandomType(name='"char"', values=of("a", "b", "%", "z", "'"), spare="S", others=("text",)),
    RandomType(name="name", values=pattern("n {n}", 20), spare="spare", others=("text",)),
    RandomType(name="uuid", values=pattern("00000000-0000-4000-8000-{n:012x}", 30), spare="f" * 32, others=("text",)),
    RandomType(name="numeric", values=of(*_NUMBERS), spare="0.001", is_exact=False),
    RandomType(name="numeric(8,2)", values=mixed("{n}.50", 20, "1.5", "1.50", "-99999.99", "NaN"), spare="0.01",
               others=("numeric",)),
    RandomType(name="float8", values=of(*_FLOATS), spare="0.001", is_exact=False),
    RandomType(name="float4", values=of("0", "-0", "NaN", "0.1", "1e-30", "Infinity", "7", "8"), spare="0.5",
               is_exact=False, others=("float8",)),
    RandomType(name="money", values=pattern("{n}.05", 20), spare="0.01"),
    RandomType(name="bool", values=of("t", "f"), others=("text",)),
    RandomType(name="date", values=mixed("2024-02-1{n}", 10, "infinity", "0044-03-15 BC", "2024-02-29"),
               spare="1970-01-01", others=("timestamp",)),
    RandomType(name="timestamp", values=mixed("2024-01-01 00:00:00.{n:06}", 20, "infinity", "-infinity",
               "0044-03-15 12:00:00 BC"), spare="1970-01-01"),
    RandomType(name="timestamptz", values=mixed("2024-01-01 12:00:{n}.5+00", 20, "infinity", "1999-12-31 23:59:59+02",
               "2024-03-31 02:30:00+00"), spare="1970-01-01 00:00:00+00"),
    RandomType(name="time", values=mixed("12:00:{n}", 20, "24:00:00", "00:00:00.000001"), spare="01:01:01"),
    RandomType(name="timetz", values=mixed("12:00:{n}+02", 20, "10:00:00+00", "12:00:00+02"), spare="01:01:01+00"),
    RandomType(name="interval", values=of(*_SPANS), spare="00:00:00.000001", is_exact=False),
    RandomType(name="bytea", values=of("\\x", "\\x00ff27", "\\x5c", "\\x00", "\\x0000", "\\x61"), spare="\\xfeed"),
    RandomType(name="bit(5)", values=of("00000", "10101", "00001", "11111", "01000"), spare="11011"),
    RandomType(name="varbit", values=of("", "0", "00", "1", "10101"), spare="110110"),
    RandomType(name="inet", values=mixed("10.0.0.{n}", 20, "10.0.0.1/24", "::1", "::ffff:1.2.3.4"), spare="1.1.1.1",
               others=("text",)),
    RandomType(name="cidr", values=mixed("10.0.{n}.0/24", 20, "::/0", "10.0.0.0/16"), spare="1.1.1.1/32",
               others=("inet",)),
    RandomType(name="macaddr", values=pattern("08:00:2b:01:02:{n:02x}", 20), spare="ff:ff:ff:ff:ff:ff"),
    RandomType(name="oid", values=mixed("{n}", 20, "4294967295"), spare="77777", others=("bigint",)),
    RandomType(name="pg_lsn", values=pattern("0/{n:X}", 20), spare="F/F"),
    RandomType(name="xid8", values=pattern("{n}", 20), spare="777"),
    RandomType(name="mood", values=of("sad", "ok", "happy"), others=("text",)),
    RandomType(name="point2", values=of('(1,"a b")', "(,)", '(2,"""")', "(1,)", '(,"")', "(3,x)"), spare="(9,spare)"),
    RandomType(name="int[]", values=of("{}", "{1,2}", "{1,NULL,3}", "[2:3]={7,8}", "{{1,2},{3,4}}", "{7,8}", "{NULL}"),
               spare="{9}"),
    RandomType(name="text[]", values=of('{"a,b",NULL,"NULL"}', "{}", '{"\\\\","\\""}', "{a}", "{A}", '{""}', '{"{}"}'),
               spare="{spare}"),
    RandomType(name="numeric[]", values=of("{1.0}", "{1.00}", "{NaN,NULL}", "{}", "{-0.0}", "{0}"), spare="{9}",
               is_exact=False),
    RandomType(name="point2[]", values=of("{}", '{"(1,a)",NULL}', '{"(,\\"\\")"}', '{"(2,\\"b c\\")"}'),
               spare='{"(9,spare)"}'),
    RandomType(name="int4range", values=of("empty", "[1,5)", "(,3]", "(,)", "[1,4]", "[7,8)"), spare="[99,100)",
               others=("text",)),
    RandomType(name="numrange", values=of("empty", "[1.0,5)", "[1.00,5.0)", "(,3]", "[2,2]", "[2.0,2.00]"),
               spare="[99,100)", is_exact=False),
    RandomType(name="tstzrange", values=of("empty", "[2024-01-01,2024-02-01)", "(,infinity]", "[2024-01-01,)"),
               spare="[1999-01-01,2000-01-01)"),
    RandomType(name="int4multirange", values=of("{}", "{[1,2),[5,6)}", "{(,3)}", "{[1,3),[2,4)}"), spare="{[99,100)}"),
    RandomType(name="jsonb", values=of('{"a": 1}', '{"b": [1, 2, {"c": null}]}', "[]", '"text"', "1.0", "1.00", "null",
               '{"b": 1, "a": [{}]}', '"\\u00e4"', "1e2", "100"), spare='"spare"', is_exact=False),
    RandomType(name="tsvector", values=of("", "a:1 b:2", "'o''k':3", "a b"), spare="spare"),
    RandomType(name="short_text", values=of("", "x", "twelve chars", "X"), spare="spare", others=("text",)),
    RandomType(name="rounded", values=mixed("{n}.50", 20, "1.005", "-99999.99", "NaN"), spare="0.01"),
    RandomType(name="some_ints", values=of("{}", "{1,2}", "{1,NULL,3}", "{{1,2},{3,4}}", "{7}"), spare="{9}"),
    RandomType(name="span", values=of("empty", "[1,5)", "(,3]", "[1,4]", "[7,8)"), spare="[99,100)"),
    RandomType(name="place", values=of('(1,"a b")', "(,)", '(2,"""")', "(1,)"), spare="(9,spare)"),
    RandomType(name="citext", values=of(*_CASES), spare="spare", is_exact=False, needs=Feature.CITEXT),
    RandomType(name="hstore", values=of("", "a=>1", "a=>2", "b=>NULL", '"a b"=>"x,y"', 'a=>"\\""'),
               spare="spare=>1", needs=Feature.HSTORE),
    RandomType(name="text COLLATE caseless", values=of(*_CASES), spare="spare", is_exact=False, needs=Feature.ICU),
    RandomType(name="text COLLATE accentless", values=of(*_CASES), spare="spare", is_exact=False, needs=Feature.ICU),
    RandomType(name='text COLLATE "und-x-icu"', values=of(*_CASES), spare="spare", needs=Feature.ICU),
    RandomType(name="json", values=of('{"a":1, "a":2}', "[ 1 ]", "null"), is_key=False, is_comparable=False,
               others=("text",)),
    RandomType(name="point", values=of("(1,2)", "(-0,NaN)", "(1e-300,Infinity)"), is_key=False, is_comparable=False),
    RandomType(name="box", values=of("(1,1),(0,0)", "(0,0),(-1,-1)"), is_key=False, is_comparable=False),
    RandomType(name="polygon", values=of("((0,0),(1,1),(1,0))"), is_key=False, is_comparable=False),
    RandomType(name="jsonpath", values=of("$.a[*] ? (@ > 1)", "strict $"), is_key=False, is_comparable=False),
    RandomType(name="tsquery", values=of("a & b", "!'o''k'"), others=("text",)),
)  # fmt: skip

#: By name.
TYPES: Final = {one.name: one for one in _ALL}

#: Its columns cannot be compared with its values, but for a cast: an operator for any enum takes no domain.
ENUM_DOMAIN: Final = RandomType(
    name="mood_domain", values=of("sad", "ok"), spare="happy", compared_as="mood"
)  # fmt: skip

#: Types that a row filter takes: it refuses types and collations that are not PostgreSQL's own.
_OWN = frozenset(
    {"mood", "point2", "point2[]", "short_text", "rounded", "some_ints", "span", "place", "citext", "hstore"}
)


def is_filtered(type_name: str) -> bool:
    """Return whether a row filter may compare a type."""
    return type_name not in _OWN and not type_name.startswith("text COLLATE ")


def key_types(features: frozenset[Feature]) -> list[RandomType]:
    """Return what the first column of a key may be: ordered, and with a spare value."""
    return [one for one in available(features) if one.is_key and one.spare]


def available(features: frozenset[Feature]) -> list[RandomType]:
    """Return the types of servers with these features."""
    return [one for one in _ALL if one.needs is None or one.needs in features]
