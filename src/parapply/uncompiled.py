"""What the interpreted twin of a compiled module sees in place of the compiler's module ``cython``."""

from __future__ import annotations

from typing import Final

compiled: Final = False
