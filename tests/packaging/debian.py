"""``python -m tests.packaging.debian [--unit] PACKAGE.deb``: lintian, and its life in a Debian until it is purged.

The Debian is made by debootstrap from where apt gets its packages, so this is a target of the Makefile and no test.
With `--unit` its systemd also runs the unit, which needs root and systemd-nspawn (package systemd-container).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from parapply import __version__
from tests.packaging import unit


def run(*command: str) -> str:
    """Run a command and return what it prints; one that fails ends the program."""
    print("==", " ".join(command), flush=True)  # noqa: T201  talks to a person
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout, flush=True)  # noqa: T201  as above
        raise SystemExit(f"{command[0]} failed: exit {done.returncode}")
    return done.stdout


def debootstrap(root: Path, packages: tuple[str, ...]) -> None:
    """Make the smallest system with some packages, of this machine's release."""
    fields = ["$(REPO_URI)", "$(CODENAME)"]
    listed = run("apt-get", "indextargets", "--format", " ".join(fields), "Created-By: Packages").splitlines()
    release = next(
        one.partition("=")[2] for one in Path("/etc/os-release").read_text().splitlines() if "CODENAME" in one
    )
    mirror = next(line.split()[0] for line in listed if line.split()[1:] == [release])
    print("== debootstrap", release, flush=True)  # noqa: T201  as above
    make = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", release, str(root), mirror]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)


def _try(package: Path, root: Path) -> None:
    def inside(*command: str) -> str:
        return run("chroot", str(root), *command)

    def files() -> set[str]:
        found = (
            str(one.relative_to(root)) for place in ("usr", "etc", "var/lib") for one in root.joinpath(place).rglob("*")
        )
        # Caches of the linker and dpkg's own notes change, and belong to no package.
        return {one for one in found if not one.startswith(("var/lib/dpkg", "etc/ld.so.cache"))}

    before = files()
    shutil.copy(package, root / "parapply.deb")
    inside("dpkg", "--install", "parapply.deb")
    shown = inside("parapply", "--version")
    assert shown.startswith(f"parapply {__version__}\n"), shown
    assert "hot path compiled" in shown
    inside("parapply", "top", "--help")
    # As the unit runs it: not root, and with a read-only system.
    refused = subprocess.run(
        ["chroot", "--userspec=65534:65534", str(root), "parapply", "run", "--config", "/nothing.toml"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 2, refused.stderr
    inside("dpkg", "--install", "parapply.deb")
    inside("dpkg", "--remove", "parapply")
    (root / "var/log/parapply/app").mkdir(parents=True)
    inside("dpkg", "--purge", "parapply")
    assert files() - before == set()
    assert not (root / "var/log/parapply").exists()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit", action="store_true", help="boot the Debian and have its systemd run the unit")
    parser.add_argument("package", type=Path)
    options = parser.parse_args()
    run("lintian", "--fail-on", "error,warning", "--allow-root", str(options.package))
    with tempfile.TemporaryDirectory() as directory:
        debian = Path(directory) / "debian"
        debian.mkdir(mode=0o755)
        Path(directory).chmod(0o755)
        debootstrap(debian, ("python3", *(unit.PACKAGES if options.unit else ())))
        _try(options.package, debian)
        print("installed, renewed, removed and purged", flush=True)  # noqa: T201  as above
        if options.unit:
            unit.run(options.package, debian)
            print("started, confined, reloaded, restarted, refused, renewed and removed by systemd", flush=True)  # noqa: T201
