"""The command `parapply top`; without a terminal, or once, it needs no Textual."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.util import find_spec
from typing import Any

import click

from parapply.cli.options import connection_options
from parapply.cli.several import Result, Several, configs, several_options, worst
from parapply.errors import ConfigError
from parapply.extras import install_hint

_EPILOG = """\b
Examples:
  parapply top --config app.toml
  parapply top --config app.toml --once
  parapply top --config app.toml --once --json | jq '.rates[0]'
  parapply top --config fleet.toml
It reads the state tables on the target, as status does, so it runs on any machine that reaches the target, and needs a
role that may read them. Rates cover the last ten seconds. Keys: q quit, s sort, space pause; of several
databases a line for each: up, down, Enter opens one, Escape goes back."""


@click.command(epilog=_EPILOG)
@connection_options
@several_options
@click.option("--interval", "interval_s", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, metavar="S",
              help="Between two looks.")  # fmt: skip
@click.option("--once", is_flag=True, help="Look twice, 2.5 s apart at least, print one screen, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: one JSON object for programs.")
def top(*, interval_s: float, once: bool, as_json: bool, **options: Any) -> int:
    """Watch a slot live: lag, workers and what they wait for, hot tables; of several databases, a line of each."""
    if as_json and not once:
        raise click.UsageError("--json belongs to --once")
    if not once:
        _check_terminal()
    found = configs(options, "source.dsn", "source.publications")
    from parapply.top import show  # noqa: PLC0415

    if not isinstance(found, Several):
        asyncio.run(show.once(found, interval_s, as_json=as_json) if once else show.live({"": found}, interval_s))
        return 0
    if not once:
        asyncio.run(show.live(found.configs, interval_s))
        return 0
    slots = asyncio.run(show.twice(found.configs, interval_s))
    results = {
        one.name: Result(one.error.exit_code, "", error=one.error)
        if one.error
        else Result(0, "read", one.history.document())
        for one in slots
    }
    if as_json:
        click.echo(json.dumps(found.document(results), indent=2))
    else:
        show.print_overview(slots)
        found.print_left_out()
    return worst(results)


def _check_terminal() -> None:
    if find_spec("textual") is None:
        raise ConfigError(
            "parapply top needs Textual, which is not installed",
            hint=f"{install_hint('top')}; or parapply top --once, or parapply status --watch, without it",
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("no terminal: use --once")
