"""The HTTP endpoint of the daemon: /metrics for Prometheus, /healthz for process monitors, / for people.

It serves from before the ends are connected until the daemon ends. A process of several slots answers for all of them:
each series has its slot, a probe says no if one slot does, and each slot has its page.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from parapply import __version__
from parapply.http_server import TEXT, HttpServer
from parapply.logs import get_logger
from parapply.metrics.exposition import CONTENT_TYPE, SlotFigures, exposition
from parapply.runtime.observe import page_html
from parapply.runtime.observe.page_html import POLICY, Link, Number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.config_values import Address
    from parapply.runtime.observe.view import SlotView

_JSON: Final = "application/json"
_HTML: Final = "text/html; charset=utf-8"
_SLOTS: Final = "/slots/"
_PATHS: Final = "/, /metrics, /healthz, /healthz/live, /healthz/ready"

#: Status, content type and body.
Answer = tuple[int, str, bytes]


class FleetSlot(NamedTuple):
    """One slot of several, as it is shown."""

    slot: str
    report: dict[str, Any]  # as /healthz has it, with the database
    view: SlotView | None  # None: it has not begun yet


class Endpoint(HttpServer):
    """Opened by the daemon."""

    def __init__(self, answer: Callable[[str], Answer | None], paths: str = _PATHS) -> None:
        """Start without listening; `answer` returns None for an unknown path, and the client sees `paths`."""
        super().__init__(lambda path: answer(path) or (404, TEXT, f"{paths}\n".encode()), POLICY)

    async def open(self, address: Address) -> tuple[str, int]:
        """Begin to listen; raise ConfigError if the address is taken, or not one of this machine."""
        host, port = await super().open(address)
        get_logger().info("metrics_listening", host=host, port=port)
        return host, port


def endpoint_of(view: SlotView) -> Endpoint:
    """Return the endpoint of a process that has one slot."""

    def answer(path: str) -> Answer | None:
        if path == "/":
            return 200, _HTML, view.page.html()
        if path == "/metrics":
            return 200, CONTENT_TYPE, exposition([_measured(view)])
        return _probe(path, view.health.report())

    return Endpoint(answer)


def endpoint_of_fleet(slots: Callable[[], Sequence[FleetSlot]]) -> Endpoint:
    """Return the endpoint of a process that has several slots, which may come and go."""

    def answer(path: str) -> Answer | None:
        found = slots()
        if path == "/":
            return 200, _HTML, _overview(found)
        if path == "/metrics":
            return 200, CONTENT_TYPE, exposition([_measured(one.view) for one in found if one.view is not None])
        if path.startswith(_SLOTS):
            pages = [one.view.page for one in found if one.view is not None and path == _SLOTS + one.slot]
            return (200, _HTML, pages[0].html()) if pages else None
        reports = [one.report for one in found]
        both = {key: all(report[key] for report in reports) for key in ("live", "ready")}
        return _probe(path, {**both, "slots": reports})

    return Endpoint(answer, f"{_PATHS}, {_SLOTS}NAME")


def _measured(view: SlotView) -> SlotFigures:
    state, _ = view.health.state
    values = view.figures.values() | view.gauges.values(state, is_ready=view.health.is_ready)
    return SlotFigures(view.slot, values, view.figures.of_batches)


def _probe(path: str, report: dict[str, Any]) -> Answer | None:
    is_ready = report["live"] and report["ready"]
    checks = {"/healthz": is_ready, "/healthz/live": report["live"], "/healthz/ready": is_ready}
    if path not in checks:
        return None
    return 200 if checks[path] else 503, _JSON, (json.dumps(report) + "\n").encode()


def _overview(slots: Sequence[FleetSlot]) -> bytes:
    n_ready = sum([one.report["ready"] for one in slots])
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    rows = [
        (
            Link(one.slot, _SLOTS + one.slot),
            one.report["database"],
            one.report["state"],
            Number("" if one.report["lag_s"] is None else f"{one.report['lag_s']:.1f} s"),
            one.report["reason"],
        )
        for one in sorted(slots, key=lambda one: one.report["ready"])
    ]
    said = f"{n_ready:,} of {len(slots):,} slots apply"
    parts = [
        page_html.heading(said, f"as of {at} UTC, parapply {__version__}"),
        page_html.table("Slots", ("slot", "database", "state", "lag", "because"), rows),
    ]
    return page_html.document(said, parts)
