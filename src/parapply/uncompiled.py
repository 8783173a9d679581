"""Stand-in for the compiler's module ``cython`` in the interpreted twin of a compiled module."""

from __future__ import annotations

from typing import Final

compiled: Final = False
