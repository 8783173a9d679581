"""Output of `--version`: the facts that a bug report needs, and a digest that differs between two builds."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

import parapply

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Digits of the digest that are shown: enough for all commits of a project.
_DIGITS: Final = 12


def show(ctx: click.Context, _param: click.Parameter, is_asked: bool) -> None:  # noqa: FBT001  click's
    """Print the versions and end the program, if it is asked to."""
    if is_asked and not ctx.resilient_parsing:
        click.echo("\n".join(_lines()))
        ctx.exit()


def _lines() -> Iterator[str]:
    import psycopg  # noqa: PLC0415  help does without it

    libpq = psycopg.pq.version()
    hot_path = f"interpreted ({parapply.WHY_INTERPRETED})" if parapply.WHY_INTERPRETED else "compiled"
    yield f"parapply {parapply.__version__}"
    yield f"sources {sources_digest(Path(parapply.__file__).parent)}, hot path {hot_path}"
    yield (
        f"python {'.'.join(map(str, sys.version_info[:3]))}, psycopg {psycopg.__version__} ({psycopg.pq.__impl__}),"
        f" libpq {libpq // 10000}.{libpq % 10000}"
    )


def sources_digest(package: Path) -> str:
    """Return a digest of the names and contents of a package's modules, which is the same in a checkout and a wheel."""
    digest = hashlib.sha256()
    for name, file in sorted((file.relative_to(package).as_posix(), file) for file in package.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:_DIGITS]
