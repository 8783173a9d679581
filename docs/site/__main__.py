"""``python -m docs.site [FOLDER]`` builds the site; any warning of mkdocs, such as a dead link, is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from docs.site.staging import ROOT, stage


def build(folder: Path) -> None:
    """Build the site.

    Args:
        folder: gets `pages`, which mkdocs reads, and `site`, which a browser opens.

    Raises:
        CalledProcessError: mkdocs has warned of something.
    """
    stage(folder / "pages")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (folder / "mkdocs.yml").write_text(f"docs_dir: pages\nsite_dir: site\n{settings}", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--clean"]
    # The theme has an advertisement, which the variable leaves out.
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(  # noqa: S603  our own words
        [*command, "--config-file", str(folder / "mkdocs.yml")], check=True, env=environ
    )


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build"
    build(place)
    sys.stdout.write(f"{place}/site/index.html\n")
