"""Script of pg_dump for the time after the rows, cut into statements that can run separately. Pure.

In: a script of `pg_dump --section=post-data`. Out: its head, and items in the script's order, which follows their
dependencies.

Source: `pg_backup_archiver.c`, _printTocEntry, for what comes before a header.
"""

from __future__ import annotations

import hashlib
import re
from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec

from parapply.copy.schema import DumpedStatement, edited, statements
from parapply.quoting import identifier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ItemGroup(Enum):
    """How an item may run."""

    BUILD = auto()  # an index, or a constraint that has one: beside others of its kind
    FOREIGN_KEY = auto()  # beside others of its kind
    SERIAL = auto()  # in the script's order


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """An object's definition with what belongs to it, such as its comment."""

    title: str  # for people
    text: str
    group: ItemGroup
    is_default_privilege: bool = False

    @property
    def digest(self) -> str:
        """Return its name in the state."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A script cut up."""

    head: str  # settings of the session
    items: tuple[Item, ...]

    @property
    def default_privileges(self) -> tuple[Item, ...]:
        """Return the items that hold for objects made later, and change no existing one."""
        return tuple([item for item in self.items if item.is_default_privilege])

    @property
    def before_foreign_keys(self) -> tuple[Item, ...]:
        """Return the items that can be made while the tables' rows are of different moments."""
        found = (number for number, item in enumerate(self.items) if item.group is ItemGroup.FOREIGN_KEY)
        return self.items[: next(found, len(self.items))]


def runs(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yield items that may run beside each other, in order; a serial one alone."""
    together: list[Item] = []
    for item in items:
        if together and (item.group is ItemGroup.SERIAL or item.group is not together[-1].group):
            yield together
            together = []
        together.append(item)
    if together:
        yield together


def parse(text: str) -> Script:
    """Cut a script up; raise ValueError if it ends within a statement."""
    head = ""
    found: list[_Open] = []
    settings: dict[str, str] = {}
    for one in statements(text):
        if one.skeleton.startswith("SET default_"):
            # It comes before the header of what it is for, and holds until the next one.
            settings[one.skeleton.split(" ", 2)[1]] = one.text
        elif not found and not one.title:
            head += one.text + ";\n"
        elif one.skeleton.startswith("REFRESH MATERIALIZED VIEW"):
            # A separate step does that, when there is something to show.
            found.append(_Open(one.title, [], []))
        elif found and (not one.title or _BELONGS.match(one.skeleton)):
            found[-1].statements.append(one)
        else:
            needed = () if one.skeleton.startswith(_DEFAULT_PRIVILEGES) else settings.values()
            found.append(_Open(one.title, list(needed), [one]))
    items = [
        Item(
            title=one.title,
            text=";\n".join([*one.settings, *[each.text for each in one.statements]]) + ";\n",
            group=_group(one.statements[0].skeleton),
            is_default_privilege=all(each.skeleton.startswith(_DEFAULT_PRIVILEGES) for each in one.statements),
        )
        for one in found
        if one.statements
    ]
    return Script(head=head, items=tuple(items))


def without_system_grants(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a script without grants on the server's own objects, and these: only a superuser can give them.

    Raises:
        ValueError: it ends within a statement.
    """
    left_out: list[str] = []

    def edit(one: DumpedStatement) -> str | None:
        if not _SYSTEM_GRANT.match(one.skeleton):
            return None
        left_out.append(one.text)
        return ""

    return edited(text, edit), tuple(left_out)


def without_grants_to(text: str, role: str) -> str:
    """Return a script without the privileges of a role, also those on objects made later.

    Raises:
        ValueError: the script ends within a statement.
    """
    names = "|".join([re.escape(role), re.escape(identifier(role))])
    ends_with_role = re.compile(rf" (TO|FROM) ({names})( WITH GRANT OPTION)?\Z")
    return edited(
        text, lambda one: "" if _GRANT.match(one.skeleton) and ends_with_role.search(one.text) is not None else None
    )


class _Open(msgspec.Struct, frozen=True):
    title: str
    settings: list[str]
    statements: list[DumpedStatement]


_DEFAULT_PRIVILEGES = "ALTER DEFAULT PRIVILEGES "
_SYSTEM_GRANT = re.compile(r"(GRANT|REVOKE) .* ON ([A-Z ]+ )?(pg_catalog\.|SCHEMA pg_catalog )")
_GRANT = re.compile(r"(GRANT|REVOKE|ALTER DEFAULT PRIVILEGES) ")
_BELONGS = re.compile(r"COMMENT ON |SECURITY LABEL ")
_BUILD = re.compile(
    r"CREATE (UNIQUE )?INDEX |ALTER TABLE (ONLY )?\S+ ADD CONSTRAINT \S+ (PRIMARY KEY|UNIQUE|EXCLUDE)\b"
)
_FOREIGN_KEY = re.compile(r"ALTER TABLE (ONLY )?\S+ ADD CONSTRAINT \S+ FOREIGN KEY\b")


def _group(skeleton: str) -> ItemGroup:
    if _FOREIGN_KEY.match(skeleton):
        return ItemGroup.FOREIGN_KEY
    return ItemGroup.BUILD if _BUILD.match(skeleton) else ItemGroup.SERIAL
