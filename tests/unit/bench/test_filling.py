"""Scripts that fill both servers of the benchmark."""

from __future__ import annotations

import re
from pathlib import Path

import bench


def test_both_servers_are_filled_alike() -> None:
    """Nothing that a schema's script inserts depends on the time or on chance, or every run would find a difference."""
    scripts = sorted((Path(bench.__file__).parent / "scripts").glob("*.schema.sql"))
    assert scripts
    inserting = [
        path.name
        for path in scripts
        for statement in path.read_text(encoding="utf-8").split(";")
        if "INSERT" in statement and re.search(r"now\(\)|random|clock_timestamp|current_", statement, re.IGNORECASE)
    ]
    assert inserting == []
