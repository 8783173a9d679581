"""The Debian package as files; `make deb-test` builds, checks, installs and purges it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_DEBIAN = ROOT / "config" / "debian"
_BUILD = (_DEBIAN / "build").read_text(encoding="utf-8")


@pytest.mark.parametrize(("shell", "name"), [("bash", "build"), ("sh", "postinst"), ("sh", "prerm"), ("sh", "postrm")])
def test_a_script_is_one_that_its_shell_reads(shell: str, name: str) -> None:
    """The shell takes every line, and each script ends at the first command that fails."""
    done = subprocess.run([shell, "-n", str(_DEBIAN / name)], capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^set -e", (_DEBIAN / name).read_text(encoding="utf-8"), re.MULTILINE)


def test_what_the_package_takes_from_the_repository_is_there() -> None:
    """Each file that the build names exists, and the unit has the path that the build changes."""
    named = set(re.findall(r'"\$root/([^"$]+)"', _BUILD)) | {
        f"config/debian/{name}" for name in re.findall(r'"\$here/([a-z-]+)"', _BUILD)
    }
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []
    unit = (ROOT / "config" / "systemd" / "parapply@.service").read_text(encoding="utf-8")
    (replaced,) = re.findall(r"'s\|(/opt[^|]+)\|", _BUILD)
    assert replaced in unit
