"""Keys whose equal values print differently, for `test_sets.py` (trap T-21)."""

from __future__ import annotations

from tests.fixtures.fan import Case
from tests.integration.table_cases import CASELESS_TYPE

#: For every database, before the tables: a type compared without regard to case.
SETUP = CASELESS_TYPE

#: Equal values that print differently, by column type (trap T-21).
EQUAL_TEXTS = {
    "numeric": ("1.0", "1.00"),
    "char(5)": ("a", "a    "),
    "float8": ("-0", "0"),
    "interval": ("1 mon", "30 days"),
    "jsonb": ("1.0", "1.00"),
    "ext.ci": ("Bob", "BOB"),
    "numeric[]": ("{1.0}", "{1.00}"),
    "numrange": ("[1.0,2]", "[1.00,2.0]"),
}
#: The same where the server has ICU and citext.
EQUAL_TEXTS_ICU = {
    "citext": ("Bob", "bOB"),
    "text COLLATE caseless": ("Bob", "BOB"),
    "varchar(5) COLLATE caseless": ("x", "X"),
}


def equal_texts_case(texts: dict[str, tuple[str, str]], extra: str = "") -> Case:
    """Return a case in which each type's key is written in two texts of one value, back and forth (trap T-21)."""
    tables = [extra]
    transactions: list[str] = []
    for number, (type_, (first, second)) in enumerate(texts.items()):
        table = f"k{number}"
        tables.append(f"CREATE TABLE {table} (v int, k {type_} PRIMARY KEY);")
        for turn, (one, same) in enumerate([(first, second), (second, first)] * 2):
            transactions += [
                f"INSERT INTO {table} VALUES ({turn}, '{one}')",
                f"DELETE FROM {table} WHERE k = '{same}'",
                f"INSERT INTO {table} VALUES ({turn}, '{same}')",
                f"UPDATE {table} SET k = '{one}', v = v + 10 WHERE k = '{same}'",
                f"UPDATE {table} SET v = v + 1 WHERE k = '{same}'",
                *([f"DELETE FROM {table}"] if turn < 3 else []),
            ]
    return Case(name="t21", tables="".join(tables), transactions=transactions)
