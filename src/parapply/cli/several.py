"""Several databases in one command: which ones, and one table, one document and one exit code of all.

In: the configuration, as a file of several databases or as a template, and names. Out: each database's result; an error
of one is its result, and the others go on.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from parapply.cli.options import flags_of, repeated, together
from parapply.errors import ConfigError, ParapplyError
from parapply.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from parapply.config import Config
    from parapply.login import Login


#: Asked for the names of the others, where the template names none: every server has it from the start.
_FIRST: Final = "postgres"


class Result(NamedTuple):
    """All that is known of one database at the end of a command."""

    exit_code: int
    said: str  # for the table
    report: dict[str, Any] | None = None  # as --json has it for a single database
    error: ParapplyError | None = None  # that is the result


class Several(NamedTuple):
    """Databases that a command is about."""

    configs: dict[str, Config]  # by name
    left_out: dict[str, str]  # the reason by name
    is_of_file: bool  # which names them

    def each(self, do: Callable[[Config], Result], *, as_json: bool) -> int:
        """Do something for each database, print all results, and return the worst exit code."""
        found: dict[str, Result] = {}
        for name, config in self.configs.items():
            try:
                found[name] = do(config)
            except ParapplyError as error:
                found[name] = Result(error.exit_code, "", error=error)
        if as_json:
            click.echo(json.dumps(self.document(found), indent=2))
        else:
            self.print(found)
        return worst(found)

    def document(self, found: dict[str, Result]) -> dict[str, Any]:
        """Return all results for programs."""
        from parapply.logs import redact_text  # noqa: PLC0415

        return {
            "exit_code": worst(found),
            "databases": [
                {
                    "database": name,
                    "slot_name": self.configs[name].source.slot,
                    "exit_code": one.exit_code,
                    "error": redact_text(str(one.error)) if one.error else None,
                    "hint": one.error.hint if one.error else None,
                    "report": one.report,
                }
                for name, one in found.items()
            ],
            "left_out": [{"database": name, "reason": reason} for name, reason in self.left_out.items()],
        }

    def print(self, found: dict[str, Result]) -> None:
        """Print a line for each result."""
        from parapply.logs import redact_text  # noqa: PLC0415

        rows = [("database", "slot", "exit", "result")]
        rows += [
            (
                printable(name),
                self.configs[name].source.slot,
                str(one.exit_code),
                redact_text(one.error.line()) if one.error else printable(one.said),
            )
            for name, one in found.items()
        ]
        widths = [max([len(row[at]) for row in rows]) for at in range(3)]
        for *cells, said in rows:
            # Never wrapped or cut, so that it can be searched and copied.
            padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
            click.echo("  ".join([*padded, said]))
        self.print_left_out()

    def print_left_out(self) -> None:
        """Print a line for each database that is left out."""
        for name, reason in self.left_out.items():
            click.echo(f"left out: {printable(name)}: {reason}")


def worst(found: dict[str, Result]) -> int:
    """Return the exit code of all together."""
    return max([one.exit_code for one in found.values()], default=0)


#: Options that choose several databases.
several_options = together(
    click.option(
        "--all-databases", "is_all", is_flag=True, help="Each database of the publisher's server; DSNs are templates."
    ),
    repeated("--include-databases", "included", "NAME", "Just this one of them; repeatable."),
    repeated("--exclude-databases", "excluded", "NAME", "All but this one; repeatable."),
)


def configs(options: dict[str, Any], *not_needed: str, as_run: bool = False) -> Config | Several:
    """Return the configuration of the one database, or of each of several, that a command is about.

    Options about several databases are taken out of the command's. Raise ConfigError if the configuration is wrong, or
    a name belongs to no database; `as_run`, also if the totals of a file are too small for a daemon.
    """
    is_all, included, excluded = (options.pop(key) for key in ("is_all", "included", "excluded"))
    is_asked = is_all or bool(included or excluded)
    if is_asked and options["database"] is not None:
        raise click.UsageError("--database names one, and the options about several databases more")
    from parapply.config import REQUIRED, config_of, read_layers  # noqa: PLC0415
    from parapply.config_fleet import check_totals, fleet_of, one_of  # noqa: PLC0415

    required = [key for key in REQUIRED if key not in not_needed]
    layers = read_layers(options["config_path"], options["overrides"], flags_of(options), os.environ)
    left_out: dict[str, str] = {}
    is_of_file = layers.databases is not None
    if layers.databases is None:
        if not is_asked:
            return one_of(config_of(layers, required), options["database"])
        # The name of each slot begins with the shared one.
        shared = config_of(layers, [*required, "source.dsn", "source.slot"])
        names, left_out = asyncio.run(_databases(shared.source.login))
        layers = layers._replace(databases=names)
    fleet = fleet_of(layers, required)
    if as_run and is_of_file:
        check_totals(fleet)
    if options["database"] is not None:
        return one_of(fleet, options["database"])
    names = [one.name for one in fleet.databases]
    _check_named((*included, *excluded), names, left_out)
    chosen = [name for name in names if (not included or name in included) and name not in excluded]
    if not chosen:
        raise ConfigError("no database is left", hint="exclude fewer of them")
    return Several({name: one_of(fleet, name) for name in chosen}, left_out, is_of_file)


async def _databases(login: Login) -> tuple[list[str], dict[str, str]]:
    """Return the databases of a server, and those that are left out with the reason."""
    from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415

    from parapply.config_fleet import with_database  # noqa: PLC0415
    from parapply.login import Login  # noqa: PLC0415
    from parapply.source import slot  # noqa: PLC0415

    if "dbname" not in conninfo_to_dict(login.dsn):
        login = Login(with_database(login.dsn, _FIRST), login.command)
    conn = await slot.connect(login, application_name="parapply databases")
    async with conn:
        found = await slot.databases(conn)
    left_out = {
        name: "a template" if is_template else "it allows no connections"
        for name, is_template, allows in found
        if is_template or not allows
    }
    return [name for name, *_ in found if name not in left_out], left_out


def _check_named(given: Sequence[str], names: Collection[str], left_out: dict[str, str]) -> None:
    """Refuse a name of no database, which may be misspelt."""
    from parapply.config_values import did_you_mean  # noqa: PLC0415

    lines = [
        f"no database {name!r}{did_you_mean(name, names)}" if name not in left_out else f"{name!r}: {left_out[name]}"
        for name in given
        if name not in names
    ]
    if lines:
        raise ConfigError("\n".join(lines))
