"""``python -m tests.packaging.image [OPTION ...]``: buildah makes the image of the Dockerfile, and a daemon runs in it.

The base image is made by debootstrap of Debian 12 under the name that the Dockerfile gives it, so no registry of images
is needed; its Python is Debian's. Options go to `buildah build`, such as `--volume` for what pip needs to reach its
registry. It needs root and buildah, so it is a target of the Makefile and no test.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from parapply import __version__
from tests.packaging.debian import debootstrap, run

_ROOT = Path(__file__).parents[2]
#: Python of the base image: its venv has pip, and the headers are the official image's.
_PACKAGES = ("python3", "python3-venv", "python3-dev")
_NOWHERE = "host=127.0.0.1 port=1 dbname=a"
_RUN = ("run", "--source", _NOWHERE, "--target", _NOWHERE, "--slot", "app", "--publication", "app")


def _based(buildah: list[str], directory: Path) -> None:
    """Make the base image."""
    (name,) = set(re.findall(r"^FROM (\S+)", (_ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))
    root = directory / "base"
    root.mkdir(mode=0o755)
    debootstrap(root, _PACKAGES)
    (root / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
    container = run(*buildah, "from", "scratch").strip()
    run(*buildah, "copy", "--quiet", container, str(root), "/")
    run(*buildah, "commit", "--quiet", container, f"docker.io/library/{name}")
    run(*buildah, "rm", container)


def _try(buildah: list[str]) -> None:
    """Run a daemon as the image says: not root, healthy though both its ends are away, and ended by SIGTERM."""
    config = json.loads(run(*buildah, "inspect", "--type", "image", "parapply"))["Docker"]["config"]
    kind, *health = config["Healthcheck"]["Test"]
    assert (config["User"], kind, config["Entrypoint"]) == ("nobody", "CMD", ["parapply"])
    container = run(*buildah, "from", "--pull=never", "localhost/parapply").strip()
    inside = [*buildah, "run", "--isolation", "chroot", container, "--"]
    assert run(*inside, "id", "-u").strip() == "65534"
    shown = run(*inside, *config["Entrypoint"], "--version")
    assert shown.startswith(f"parapply {__version__}\n"), shown
    assert "hot path compiled" in shown
    assert "help" in run(*inside, *config["Entrypoint"], *config["Cmd"])
    for volume in config["Volumes"]:
        run(*inside, "touch", f"{volume}/some")
    for path in ("/usr/none", "/opt/parapply/none"):
        assert subprocess.run([*inside, "touch", path], check=False, capture_output=True).returncode, path
    started = [*inside, *config["Entrypoint"], *_RUN]
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as daemon:
        assert daemon.stdout is not None
        events = {}
        for line in daemon.stdout:
            event = json.loads(line)
            events[event["event"]] = event
            if event["event"] == "target_lost":
                break
        run(*inside, *health)
        os.kill(int(events["daemon_started"]["pid"]), signal.SIGTERM)
        left = [json.loads(line)["event"] for line in daemon.stdout if line.startswith("{")]
    assert left[-1] == "daemon_stopped", left


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        store = Path(temporary)
        command = ["buildah", "--root", f"{store}/store", "--runroot", f"{store}/run", "--storage-driver", "vfs"]
        _based(command, store)
        build = ["build", "--isolation", "chroot", "--pull=never", "--format", "docker", "--tag", "parapply"]
        run(*command, *build, *sys.argv[1:], str(_ROOT))
        _try(command)
    print("built, not root, healthy, ended by a signal", flush=True)  # noqa: T201  talks to a person
