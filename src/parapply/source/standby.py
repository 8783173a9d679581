"""Commits of a publisher that wait for one of its readers. Pure.

PostgreSQL reports nothing about that to a standby, and shows `pg_stat_replication.sync_state` only to members of
pg_read_all_stats; every role may read the setting that decides it.

Source: PostgreSQL manual, "synchronous_standby_names"; `src/backend/replication/syncrep.c`, `syncrep_scanner.l`.
"""

from __future__ import annotations

import re
from typing import Final

#: A name in double quotes, with "" for one of them, or a word; `*` is every standby.
_NAME: Final = re.compile(r'"((?:[^"]|"")*)"|([^\s,()"]+)')


def is_named(standby_names: str, name: str) -> bool:
    """Return whether commits wait for a standby, by `synchronous_standby_names`, or would if one before it went away.

    A standby called `first`, `any` or as a number of standbys is taken to be named wherever such a word stands: it then
    only reports more often.
    """
    found = [quoted.replace('""', '"') or word for quoted, word in _NAME.findall(standby_names)]
    return any(one == "*" or _folded(one) == _folded(name) for one in found)


def _folded(name: str) -> str:
    """Return a name as PostgreSQL compares it (`pg_strcasecmp`), which knows the case of ASCII letters only."""
    return name.encode().lower().decode()
