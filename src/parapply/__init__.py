"""parapply: parallel apply of PostgreSQL logical replication, from the subscriber's side."""

from __future__ import annotations

import os

from parapply import hotpath

__version__ = "0.1.0"

#: Why the hot path is interpreted; nothing if it is compiled. Chosen here, before any module of it is imported.
WHY_INTERPRETED = hotpath.choose(os.environ)
