"""Cost of the daemon's page: made on request, once a second at most, and cut where it would be large."""

from __future__ import annotations

from parapply.config import Config
from parapply.login import Login
from parapply.metrics.figures import Figures
from parapply.runtime.observe.gauges import Gauges
from parapply.runtime.observe.health import Health
from parapply.runtime.observe.page import StatusPage
from parapply.runtime.observe.systemd import Notifier
from parapply.runtime.shares import share_of
from parapply.source.waits import PublisherWaits
from parapply.vocabulary import DaemonState, WaitKind


async def _page(figures: Figures, now_s: list[float]) -> tuple[StatusPage, Health]:
    gauges = Gauges(Config(), share_of(Config().apply), None, PublisherWaits(lambda: Login(""), lambda _: None))
    health = Health("<slot>", gauges, Notifier())
    return StatusPage("<slot>", figures, gauges, health, clock=lambda: now_s[0]), health


async def test_it_is_made_once_a_second_however_many_ask() -> None:
    """Within a second everyone gets the same bytes, whatever has changed; the first who asks later gets new ones."""
    now_s = [100.0]
    page, health = await _page(Figures(), now_s)
    first = page.html()
    assert b"<dd>starting: connecting</dd>" in first
    health.left(DaemonState.RECONNECTING, "<why>")
    now_s[0] = 100.9
    assert page.html() is first
    now_s[0] = 101.0
    second = page.html()
    assert b'<dd class="bad">reconnecting: &lt;why&gt;</dd>' in second
    now_s[0] = 101.99
    assert page.html() is second


async def test_many_tables_are_cut() -> None:
    """Those that were waited for longest are shown, then those with most rows, and how many more there are."""
    figures = Figures()
    for number in range(900):
        figures.tables[f"s.t{number}"].rows.insert = number
    waited = figures.tables["s.<waited>"]
    waited.waits[WaitKind.KEY] = 2
    waited.wait_s[WaitKind.KEY] = 3.0
    page, _ = await _page(figures, [0.0])
    text = page.html().decode()
    assert text.count("<td>s.") == 50
    assert text.index("s.&lt;waited&gt;") < text.index("s.t899") < text.index("s.t851")
    assert '<td class="number">3.0 s</td><td>key</td>' in text
    assert "s.t850" not in text
    assert "and 851 more" in text
    assert len(text) < 30_000
