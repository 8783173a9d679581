"""The HTTP endpoint of the daemon: /metrics for Prometheus, /healthz for process monitors, / for people.

It serves from before the ends are connected until the daemon ends.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from parapply.http_server import TEXT, HttpServer
from parapply.logs import get_logger
from parapply.metrics.exposition import CONTENT_TYPE, exposition
from parapply.runtime.observe.page import StatusPage
from parapply.runtime.observe.page_html import POLICY

if TYPE_CHECKING:
    from parapply.config_values import Address
    from parapply.metrics.figures import Figures
    from parapply.runtime.observe.gauges import Gauges
    from parapply.runtime.observe.health import Health

_JSON: Final = "application/json"
_HTML: Final = "text/html; charset=utf-8"


class Endpoint:
    """Opened by the daemon."""

    def __init__(self, slot: str, figures: Figures, gauges: Gauges, health: Health) -> None:
        """Start without listening."""
        self._slot = slot
        self._figures = figures
        self._gauges = gauges
        self._health = health
        self._page = StatusPage(slot, figures, gauges, health)
        self._server = HttpServer(self._resource, POLICY)

    async def open(self, address: Address) -> None:
        """Begin to listen.

        Raises:
            ConfigError: the address is taken, or not one of this machine.
        """
        host, port = await self._server.open(address)
        get_logger().info("metrics_listening", host=host, port=port)

    async def close(self) -> None:
        """Stop listening; requests in progress are cut off."""
        await self._server.close()

    def _resource(self, path: str) -> tuple[int, str, bytes]:
        """Return status, content type and body."""
        if path == "/":
            return 200, _HTML, self._page.html()
        if path == "/metrics":
            return 200, CONTENT_TYPE, self._metrics()
        report = self._health.report()
        is_ready = report["live"] and report["ready"]
        checks = {"/healthz": is_ready, "/healthz/live": report["live"], "/healthz/ready": is_ready}
        if path in checks:
            return 200 if checks[path] else 503, _JSON, (json.dumps(report) + "\n").encode()
        return 404, TEXT, b"/, /metrics, /healthz, /healthz/live, /healthz/ready\n"

    def _metrics(self) -> bytes:
        state, _ = self._health.state
        values = self._figures.values() | self._gauges.values(state, is_ready=self._health.is_ready)
        return exposition(self._slot, values, self._figures.histograms())
