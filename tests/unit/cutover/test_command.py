"""The command `cutover`: whatever fails behind the fence, clients do not stay shut out without a word."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from parapply.cutover.command import _Cutover
from parapply.vocabulary import CutoverStep


class _Undoing:
    has_acted = False

    async def after_failure(self, *, has_stopped: bool) -> None:
        self.has_acted = not has_stopped


def test_an_error_of_our_own_making_is_also_taken_back() -> None:
    """A mistake in a comparison behind the fence raises none of our errors, and clients wait all the same."""
    cutting: Any = object.__new__(_Cutover)
    cutting._notes = SimpleNamespace(found=None, step=CutoverStep.PREPARING)
    cutting._options = SimpleNamespace(is_dry=True)
    cutting._meeting, cutting._name = SimpleNamespace(fail=lambda _name: None), ""
    cutting._has_stopped, cutting.undoing = False, _Undoing()

    async def check() -> None:
        raise TypeError("int() argument")

    cutting._check = check
    with pytest.raises(TypeError):
        asyncio.run(cutting.run())
    assert cutting.undoing.has_acted
