"""The operating system account that runs PostgreSQL, and programs it can reach.

In goes our own account; out comes the account to run servers as, or a copy of a program tree that the account can read.
Nothing here changes the mode of a directory that already existed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parapply.demo.errors import DemoError

# PostgreSQL refuses to run as the superuser; the first of these that exists runs it instead.
_ACCOUNTS = ("postgres", "nobody")
# Directories that a server needs to run; `include` is for compilers only.
_TREE_PARTS = ("bin", "lib", "share")


@dataclass(frozen=True, kw_only=True)
class Account:
    """An operating system user that may run PostgreSQL."""

    name: str  # the user's name
    uid: int  # its numeric user
    gid: int  # its numeric primary group


def server_account() -> Account | None:
    """Return the account that servers run as, or `None` when they run as the caller.

    Raises:
        DemoError: we are the superuser and no other account exists.
    """
    if os.geteuid() != 0:
        return None
    for name in _ACCOUNTS:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(name=name, uid=entry.pw_uid, gid=entry.pw_gid)
    raise DemoError(
        "PostgreSQL refuses to run as root and there is no other account to run it.",
        hint="run as an ordinary user, or create the user `postgres`",
    )


def process_options(account: Account | None) -> dict[str, Any]:
    """Return the `subprocess` arguments that run a program as the account, without the caller's groups."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def readable_copy(tree: Path, *, version_text: str, parent: Path | None = None) -> Path:
    """Copy a wheel's program tree once to where every account can read it, and return the tree in the copy.

    A virtual environment in the superuser's home cannot be entered by the account that runs the servers. The copy
    stays for later runs; version and size are in its name, so another build never uses an old copy.

    Args:
        tree: a directory with `bin`, `lib` and `share` in a package's directory. The libraries that its programs load
            lie next to the package, in `<package>.libs`, and are found by that relative path.
        version_text: such as "18.4".
        parent: where to put the copy; the system's temporary directory when `None`.

    Raises:
        DemoError: another user owns the name of the copy or could write into it; remove it by hand.
    """
    place = parent or Path(tempfile.gettempdir())
    parts = _parts(tree)
    size_bytes = sum(_tree_bytes(part) for part in parts)
    copy = place / f"parapply-programs-{os.geteuid()}-{version_text}-{size_bytes}"
    if not copy.is_symlink() and not copy.exists():
        _copy_atomically(parts, copy)
    _check_ours(copy)
    return copy / tree.relative_to(tree.parent.parent)


def _parts(tree: Path) -> dict[Path, Path]:
    """Return the directories to copy, each with its place in the copy."""
    root = tree.parent.parent
    libraries = tree.parent.with_name(f"{tree.parent.name}.libs")
    parts = [tree / name for name in _TREE_PARTS] + ([libraries] if libraries.is_dir() else [])
    return {part: part.relative_to(root) for part in parts}


def _tree_bytes(part: Path) -> int:
    return sum(path.lstat().st_size for path in part.rglob("*") if path.is_file())


def _copy_atomically(parts: dict[Path, Path], copy: Path) -> None:
    """Copy under a private name and rename; another process that is faster wins."""
    draft = Path(tempfile.mkdtemp(prefix=f"{copy.name}.", dir=copy.parent))
    try:
        for part, place in parts.items():
            shutil.copytree(part, draft / place, symlinks=True)
        _open_for_reading(draft)
        # Fails when the name has come into being since; the other one is then checked like any copy.
        with contextlib.suppress(OSError):
            draft.rename(copy)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _open_for_reading(root: Path) -> None:
    """Let every account read (and enter or run, where the owner can) a tree of our own."""
    for path in (root, *root.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            continue
        runnable = 0o555 if mode & stat.S_IXUSR else 0o444
        path.chmod((stat.S_IMODE(mode) | runnable) & ~0o022)


def _check_ours(copy: Path) -> None:
    """Refuse a copy that another user may have made: its programs would run with whatever it holds."""
    found = copy.lstat() if copy.is_symlink() or copy.exists() else None
    if found and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return
    raise DemoError(
        f"{copy} is not a directory that only this user can write.",
        hint="remove it, or set TMPDIR to another directory",
    )
