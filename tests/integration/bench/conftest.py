"""The stages of these tests have copied servers, which need no initdb, and commands that import nothing first."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from parapply.demo import command, stage
from tests.fixtures.clusters import CopiedServer
from tests.fixtures.warm_program import WarmProgram

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", autouse=True)
def copied_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers that are copies, and commands of the warm program, as long as tests of this package run."""
    program = tmp_path_factory.mktemp("program") / "python"
    with pytest.MonkeyPatch.context() as patch, closing(WarmProgram(program)):
        patch.setattr(stage, "PgServer", CopiedServer)
        patch.setattr(command, "sys", SimpleNamespace(executable=str(program)))
        yield
