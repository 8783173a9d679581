"""The stages of these tests have copied servers, which need no initdb."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.demo import stage
from tests.fixtures.clusters import CopiedServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", autouse=True)
def copied_servers() -> Iterator[None]:
    """Servers that are copies as long as tests of this package run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "PgServer", CopiedServer)
        yield
