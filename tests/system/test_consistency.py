"""The examples of docs/CONSISTENCY.md show what it says."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

from tests.fixtures.clusters import CopiedServer
from tests.fixtures.documents import ROOT

if TYPE_CHECKING:
    import pytest


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader sees at each level what the document promises; the script checks it and says so.

    Its servers are copies, which need no initdb; everything else is as written.
    """
    script = runpy.run_path(str(ROOT / "docs" / "examples" / "consistency.py"))
    script["main"].__globals__["PgServer"] = CopiedServer
    script["main"]()
    document = (ROOT / "docs" / "CONSISTENCY.md").read_text(encoding="utf-8")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    for line in lines:
        said = line.split(" at ")[0].split(" behind ")[0]
        assert said in document, line
