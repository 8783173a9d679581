"""The command that installs an extra is of the package at hand, not of another of its name on an index."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from parapply import extras

ROOT = Path(__file__).parents[2]


def test_in_a_checkout_the_checkout_is_installed() -> None:
    """With its pins."""
    assert extras.install_hint("top", "report") == f"pip install -c {ROOT}/constraints.txt '{ROOT}[top,report]'"


@pytest.mark.parametrize(
    ("origin", "hint"),
    [
        (
            '{"url": "https://example.org/parapply.whl"}',
            "pip install 'parapply[top] @ https://example.org/parapply.whl'",
        ),
        (None, "pip install 'parapply[top]'"),
    ],
)
def test_elsewhere_it_comes_from_where_the_package_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str | None, hint: str
) -> None:
    """By the address that the installer has noted; from an index only if it came from one."""
    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(metadata.Distribution, "read_text", lambda *_: origin, raising=False)
    monkeypatch.setattr(metadata.PathDistribution, "read_text", lambda *_: origin)
    assert extras.install_hint("top") == hint
