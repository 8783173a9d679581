"""`parapply check`: looks at both ends and reports its findings.

In: the configuration and options. Out: a `Report`, printed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from parapply.check import show
from parapply.check.look import CheckOptions, look

if TYPE_CHECKING:
    from parapply.config import Config


def check(config: Config, options: CheckOptions, *, as_json: bool) -> int:
    """Check, print, and return the exit code."""
    report = asyncio.run(look(config, options))
    show.show(report, as_json=as_json)
    return report.exit_code
