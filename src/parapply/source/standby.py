"""Commits of a publisher that wait for one of its readers. Pure.

PostgreSQL reports nothing about that to a standby, and shows `pg_stat_replication.sync_state` only to members of
pg_read_all_stats; every role may read the setting that decides it.

Source: PostgreSQL manual, "synchronous_standby_names"; `src/backend/replication/syncrep.c`, `syncrep_scanner.l`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A name in double quotes, with "" for one of them, or a word; `*` is every standby.
_NAME: Final = re.compile(r'"((?:[^"]|"")*)"|([^\s,()"]+)')
#: The number of standbys that commits wait for, and how they are chosen; 1 of the first ones where it is missing.
_NUMBER: Final = re.compile(r"^\s*(first|any)?\s*(\d+)\s*\(", re.IGNORECASE)


def is_named(standby_names: str, name: str) -> bool:
    """Return whether commits wait for a standby, by `synchronous_standby_names`, or would without one before it."""
    return _place(standby_names, name) is not None


def is_awaited(standby_names: str, name: str, senders: Sequence[tuple[str, str | None]]) -> bool:
    """Return whether commits wait for a standby, be it there or away, because others do not suffice.

    Args:
        standby_names: `synchronous_standby_names`.
        name: of the standby.
        senders: those that are connected: application_name and sync_state, None where the role may not see it.
    """
    if (own := _place(standby_names, name)) is None:
        return False
    places = [_place(standby_names, one) for one, _ in senders if _folded(one) != _folded(name)]
    others = [place for place in places if place is not None]
    how, number = found.groups() if (found := _NUMBER.match(standby_names)) else (None, "1")
    if len(others) < int(number):
        return True
    if (how or "first").lower() == "any":
        return False
    # The first of all that are connected; where it is not seen which are, those that the list has before this one.
    states = {state for one, state in senders if _folded(one) == _folded(name)}
    return "sync" in states or (None in states and sum(place < own for place in others) < int(number))


def _place(standby_names: str, name: str) -> int | None:
    """Return the place in the list of the first entry that is a standby, None if there is none."""
    found = [quoted.replace('""', '"') or word for quoted, word in _NAME.findall(_NUMBER.sub("", standby_names))]
    return next((at for at, one in enumerate(found) if one == "*" or _folded(one) == _folded(name)), None)


def _folded(name: str) -> str:
    """Return a name as PostgreSQL compares it (`pg_strcasecmp`), which knows the case of ASCII letters only."""
    return name.encode().lower().decode()
