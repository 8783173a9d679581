"""Tables of an example, by family, each with what makes it differ from a plain table.

Every table has `id int` and `v text`, so that the same rules write to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Family:
    """Tables that belong together.

    Attributes:
        name: of the family.
        statements: that make them, on both sides.
        listed: names as a publication lists them.
    """

    name: str
    statements: tuple[str, ...]
    listed: tuple[str, ...]

    def __repr__(self) -> str:
        """Return the name, which says all in a script."""
        return self.name


FAMILIES: Final = (
    Family("plain", ("CREATE TABLE plain (id int PRIMARY KEY, v text)",), ("plain",)),
    Family(
        "keyless", ("CREATE TABLE keyless (id int, v text)", "ALTER TABLE keyless REPLICA IDENTITY FULL"), ("keyless",)
    ),
    Family(
        "inherited",
        ("CREATE TABLE par (id int PRIMARY KEY, v text)", "CREATE TABLE chi (PRIMARY KEY (id)) INHERITS (par)"),
        ("par", "chi"),
    ),
    Family(
        "parts",
        (
            "CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (5)",
            "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (5) TO (100000)",
        ),
        ("parts",),
    ),
    Family(
        "referenced",
        (
            "CREATE TABLE boss (id int PRIMARY KEY, v text)",
            "CREATE TABLE clerk (id int PRIMARY KEY, v text, boss int DEFAULT 1 REFERENCES boss ON DELETE CASCADE)",
        ),
        ("boss", "clerk"),
    ),
    Family(
        "labels",
        (
            "CREATE TYPE label AS ENUM ('a', 'b', 'c')",
            "CREATE TABLE labelled (id int PRIMARY KEY, v text, k label NOT NULL DEFAULT 'a')",
        ),
        ("labelled",),
    ),
)


def dumpable(families: Sequence[Family], majors: tuple[int, int]) -> list[Family]:
    """Return families that the target takes from pg_dump: an older one refuses a child's own primary key, by name."""
    source, target = majors
    return [one for one in families if one.name != "inherited" or target >= source] or [FAMILIES[0]]
