"""How the operator installs an extra of this very package: from where it was installed, never another of its name."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

_CHECKOUT: Final = Path(__file__).parents[2]


def install_hint(*extras: str) -> str:
    """Return the command that installs extras.

    Source: "Recording the Direct URL Origin of installed distributions" (direct_url.json), packaging.python.org.
    """
    names = ",".join(extras)
    if (_CHECKOUT / "pyproject.toml").exists():
        return f"pip install -c {_CHECKOUT / 'constraints.txt'} '{_CHECKOUT}[{names}]'"
    try:
        origin = distribution("parapply").read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    url = json.loads(origin).get("url", "") if origin else ""
    return f"pip install 'parapply[{names}] @ {url}'" if url else f"pip install 'parapply[{names}]'"
