"""The verdict of one log alone, by the report's figures and without a page: for each run of a replay."""

from __future__ import annotations

from contextlib import closing
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from parapply.analysis.compute import compute
from parapply.analysis.job import ReportRequest, convert
from parapply.analysis.progress import Silent
from parapply.analysis.store import Store
from parapply.analysis.verdict import verdict
from parapply.analysis.views import make_views

if TYPE_CHECKING:
    from pathlib import Path

    from parapply.limits import LimitVerdict

_MEMORY: Final = "1g"
#: Figures that a verdict is made of.
_FIGURES: Final = frozenset(
    {"summary", "moments", "reading", "backends", "locks", "hot_keys", "blockers", "dependencies"}
)


def verdict_of(folder: Path) -> LimitVerdict | None:
    """Return the verdict of a log of one slot; None where it is too short for one.

    Raises:
        ReportRefused, ReportFailed: it cannot be read, or DuckDB stopped.
    """
    # Also imported where nothing is installed but the daemon.
    from parapply.analysis.duck import DuckEngine  # noqa: PLC0415

    silent = Silent()
    with TemporaryDirectory(prefix="parapply-verdict-") as out, closing(DuckEngine(_MEMORY, None)) as engine:
        request = ReportRequest(log=str(folder), out=out)
        convert(engine, request, silent)
        with engine.errors():
            store = Store(engine, out)
            interval_s = make_views(store, request.scope) if store.files else 0
            if not interval_s:
                return None
            tables = compute(engine, interval_s, silent.begin, _FIGURES)
        return verdict(tables["limits"], tables)
