"""The daemon's own page: what it shows, that it is rendered once a second at most, and how a browser shows it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from tests.fixtures.browser import Browser, browser
from tests.fixtures.endpoint import LISTEN, Endpoint
from tests.fixtures.plain import FAST, closed, foreign_transaction
from tests.fixtures.route import Route

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.daemon import Daemon, RunCommand, StartDaemon
    from tests.fixtures.databases import Database

#: It would end an attribute, a text, a style and a script, and turns the text around that follows.
_NAME = """"'></td></style><script>x()</script>\u202e<b id=x>"""
_LATE = f"late {_NAME}"
#: As the page's source has it.
_ESCAPED = "&quot;&#x27;&gt;&lt;/td&gt;&lt;/style&gt;&lt;script&gt;x()&lt;/script&gt;\\u202e&lt;b id=x&gt;"
#: Nothing but what scrolls by itself is wider than the window.
_TOO_WIDE = """[...document.querySelectorAll("body *")].filter(one => !one.closest(".scroll table")
    && one.getBoundingClientRect().right > innerWidth + 0.5).map(one => one.outerHTML)"""
_REFRESHED = """new Promise(done => new MutationObserver(() => done(document.querySelectorAll("main").length))
    .observe(document.body, {childList: true}))"""


def _table(name: str) -> sql.Composed:
    return sql.SQL("CREATE TABLE {} (id int PRIMARY KEY, v int)").format(sql.Identifier(name))


@pytest.fixture
def route(source_db: Database, target_db: Database, run_command: RunCommand) -> Route:
    """A table of a hostile name, copied."""
    for database in (source_db, target_db):
        database.execute(_table(_NAME))
    source_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    settings: dict[str, str | float] = {**FAST, **LISTEN, "apply.workers": 2, "conflict.update_missing": "skip"}
    route = Route(source=source_db, target=target_db, settings=settings)
    run_command(route, "init", "--copy", code=0)
    return route


def _write(database: Database, text: str) -> None:
    database.execute(sql.SQL(text).format(sql.Identifier(_NAME)))


def _fill(route: Route, daemon: Daemon) -> None:
    """Have something to show of each kind but a batch that waits: conflict, table that waits, migration, cut-over."""
    _write(route.source, "INSERT INTO {} VALUES (1, 0), (2, 0)")
    daemon.wait_caught_up()
    _write(route.target, "DELETE FROM {} WHERE id = 2")
    _write(route.source, "UPDATE {} SET v = 1 WHERE id = 2")
    route.source.execute(_table(_LATE))
    route.source.execute(sql.SQL("INSERT INTO {} VALUES (1, 1)").format(sql.Identifier(_LATE)))
    daemon.wait_for_event("table_waits")
    daemon.wait_caught_up()
    route.target.execute(
        sql.SQL(
            "INSERT INTO parapply.migrations (slot_name, system_identifier, step, state, done, total, unit, detail)"
            " SELECT slot_name, system_identifier, 'check', 'done', 0, 0, '', '' FROM parapply.slots UNION ALL"
            " SELECT slot_name, system_identifier, 'schema', 'failed', 3, 9, 'statements', {} FROM parapply.slots;"
            "INSERT INTO parapply.cutovers (slot_id, step, reverse_slot, made_slot, made_publication, fence, opens)"
            " SELECT slot_id, 'draining', {}, true, true, 'database', '' FROM parapply.slots"
        ).format(f"failed {_NAME}", f"back {_NAME}")
    )


@pytest.mark.browser
def test_the_page_in_a_browser(route: Route, start_daemon: StartDaemon, tmp_path: Path) -> None:
    """In windows wide and narrow, light and dark: all is shown, nothing overflows, nothing else is requested or runs.

    It refreshes in place, and says so when the daemon no longer answers.
    """
    daemon = start_daemon(route)
    _fill(route, daemon)
    endpoint = Endpoint(daemon)
    program = browser()
    assert program
    with (
        foreign_transaction(route.target, f"SELECT FROM {_quoted()} WHERE id = 1 FOR UPDATE"),
        Browser(program, tmp_path) as window,
    ):
        _write(route.source, "UPDATE {} SET v = 1 WHERE id = 1")
        wanted = ("a lock held by pid", "Not applied", "draining", "Conflicts since", "Limit", "failed")
        endpoint.wait_until(lambda: all(word in endpoint.get("/")[1] for word in wanted))
        address = f"http://127.0.0.1:{endpoint.port}/"
        colours = set()
        for width in (390, 1280):
            for is_dark in (False, True):
                window.open(address, width=width, is_dark=is_dark)
                assert window.value(_REFRESHED) == 1
                assert window.value(_TOO_WIDE) == []
                assert window.value("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
                assert window.value("[document.scripts.length, document.querySelectorAll('#x').length]") == [1, 0]
                text = window.value("document.querySelector('main').innerText")
                assert all(word in text for word in wanted)
                assert text.count(_NAME.replace("\u202e", "\\u202e")) >= 4, "table, late table, step, way back"
                colours.add(window.value("getComputedStyle(document.body).backgroundColor"))
                seen = window.look()
                assert seen.said == []
                assert set(seen.asked) <= {address, "data:,"}
                (tmp_path / f"{width}-{'dark' if is_dark else 'light'}.png").write_bytes(seen.picture)
        assert len(colours) == 2, "a light one and a dark one"
        daemon.kill()
        assert window.value(
            "new Promise(done => setInterval(() => { if (!document.getElementById('silent').hidden) done(true) }, 50))"
        )


def _quoted() -> str:
    return sql.Identifier(_NAME).as_string(None)


def test_every_text_is_escaped(route: Route, start_daemon: StartDaemon) -> None:
    """Names, reasons and details of others are texts, whatever they hold, and the policy lets nothing else run."""
    daemon = start_daemon(route)
    _fill(route, daemon)
    endpoint = Endpoint(daemon)
    endpoint.wait_until(lambda: endpoint.get("/")[1].count(_ESCAPED) == 4)
    head, _, page = endpoint.raw(b"GET / HTTP/1.1\r\n\r\n").decode().partition("\r\n\r\n")
    assert "Content-Security-Policy: default-src 'none'; style-src 'sha256-" in head
    assert "text/html; charset=utf-8" in head
    assert "Cache-Control: no-store" in head
    assert page.count("<script>") == page.count("<style>") == 1
    assert "\u202e" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//|[a-z]+://""", page)
    # Every other answer may do nothing at all.
    assert b"Content-Security-Policy: default-src 'none'" in endpoint.raw(b"GET /nothing HTTP/1.1\r\n\r\n")
    daemon.stop()


def test_the_page_while_an_end_is_away(route: Route, start_daemon: StartDaemon) -> None:
    """It says so, with the reason and a lag that grows; what was counted stays."""
    daemon = start_daemon(route)
    endpoint = Endpoint(daemon)
    _write(route.source, "INSERT INTO {} VALUES (1, 0)")
    daemon.wait_caught_up()
    endpoint.wait_until(lambda: "<dt>lag</dt>" in endpoint.get("/")[1] and _ESCAPED in endpoint.get("/")[1])
    with closed(route.target):
        endpoint.wait_until(lambda: '<dd class="bad">reconnecting: ' in endpoint.get("/")[1])
        page = endpoint.get("/")[1]
        assert "<dt>lag</dt>" in page
        assert "Tables since the daemon started" in page
        assert "<h2>Workers" not in page
    endpoint.wait_until(lambda: '<dd class="good">running' in endpoint.get("/")[1])
    daemon.stop()
