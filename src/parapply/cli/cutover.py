"""`parapply cutover`: options of the command."""

from __future__ import annotations

import asyncio
import shlex
from typing import TYPE_CHECKING, Any, Final

import click

from parapply.cli.options import connection_options, path_option, repeated, seconds, switched_off, taken
from parapply.cli.several import Result, Several, configs, several_options, worst

if TYPE_CHECKING:
    from pathlib import Path

    from parapply.config import Config
    from parapply.cutover.look import CutoverOptions

#: Options that are settings.
_OF_POOLERS: Final = ("poolers", "pooler_databases", "pooler_files", "pause_timeout_s")


@click.command(
    epilog="""\b
Examples:
  parapply cutover --config app.toml --print-reverse > back.toml
  parapply cutover --config app.toml --reverse back.toml --dry-run
  parapply cutover --config app.toml --reverse back.toml --verify whole
  parapply cutover --config app.toml --reverse back.toml --undo
  parapply cutover --config app.toml --reverse back.toml --back
  parapply cutover --config app.toml --reverse back.toml --pooler port=6432 --pooler-config pgbouncer.ini
  parapply cutover --config fleet.toml --reverse fleet_back.toml
The daemon runs. Writers are kept from the source, the target gets all that they have committed, and is compared; then
the target takes the writes, and the source follows it with the daemon of --reverse. After a kill, or a refusal in the
middle, the same command goes on, or --undo takes it back. Of several databases all take over, or none. Exit 1: not in
time, a table differs, or a write came after the fence."""
)
@connection_options
@several_options
@path_option("--reverse", "reverse_path", "FILE", "Configuration of the way back: from the target to the source.")
@click.option("--back", "is_back", is_flag=True, help="The other way round: the stream of --reverse runs, and ends.")
@click.option("--undo", "is_undo", is_flag=True, help="Take back a cut-over that has not let writers in.")
@click.option("--dry-run", "is_dry", is_flag=True, help="Only look, and show the steps.")
@click.option("--print-reverse", "prints_reverse", is_flag=True, help="Print a file for --reverse; without passwords.")
@click.option(
    "--verify",
    type=click.Choice(["none", "sampled", "whole"]),
    default="sampled",
    show_default=True,
    help="Compare both sides: sampled before the fence, and what fits into a second after it; whole: after it.",
)
@repeated("--keep-role", "keep_roles", "ROLE", "Leave its sessions on the source; repeatable.")
@click.option(
    "--fence-command",
    metavar="COMMAND",
    default="",
    help="Keeps writers away (PARAPPLY_FENCE=on) and lets them in (off), instead of the database's setting.",
)
@seconds(
    "--timeout",
    "timeout_s",
    "Limit from the fence until the target has everything; then all is taken back.",
    default=60,
    least=1,
)
@switched_off("--no-sequences", "with_sequences", "Leave the sequences as they are.")
@repeated(
    "--pooler",
    "poolers",
    "DSN",
    "Console of a PgBouncer, paused from before the fence until the target takes over; repeatable.",
)
@repeated("--pooler-database", "pooler_databases", "NAME", "As clients name it there; repeatable.")
@repeated(
    "--pooler-config",
    "pooler_files",
    "FILE",
    "Its pgbouncer.ini, in which the database is led to the target; one for each --pooler, or for all.",
)
@seconds(
    "--pause-timeout",
    "pause_timeout_s",
    "Limit until all transactions have ended at the poolers.  [default: 10]",
    least=0.1,
)
@click.option(
    "--leave-poolers",
    "leaves_poolers",
    is_flag=True,
    help="Go on without the poolers that it has paused and are not named now.",
)
def cutover(*, reverse_path: Path | None, is_undo: bool, prints_reverse: bool, **options: Any) -> int:
    """Have the target take over, with a way back."""
    is_back, is_dry = options["is_back"], options["is_dry"]
    if prints_reverse and (reverse_path or is_back or is_undo or is_dry):
        raise click.UsageError("--print-reverse goes with the options of a connection only")
    if is_undo and is_dry:
        raise click.UsageError("--undo has no --dry-run")
    if not prints_reverse and reverse_path is None:
        raise click.UsageError("--reverse FILE is missing; --print-reverse prints one")
    flags = {f"cutover.{key}": options[key] for key in _OF_POOLERS}
    found = configs({**options, "flags": flags})
    from parapply.cutover import command, look, way_back  # noqa: PLC0415
    from parapply.cutover.meeting import Meeting  # noqa: PLC0415

    if reverse_path is None:
        if isinstance(found, Several):
            raise click.UsageError("--print-reverse is of one database: --database NAME; then write the names into it")
        return way_back.print_reverse(found)
    if isinstance(found, Several) and options["pooler_databases"]:
        raise click.UsageError(
            "--pooler-database names one: several have their names at the source, or cutover.pooler_databases of each"
        )
    again = ["parapply", "cutover", "--config", str(options["config_path"] or "...")]
    again += ["--reverse", str(reverse_path), *_chosen(options), *([] if is_back else ["--back"])]
    run = options["config_path"] or "..." if is_back else reverse_path
    how = taken(
        look.CutoverOptions,
        options,
        other_way=shlex.join(again),
        hint=f"now: parapply run --config {shlex.quote(str(run))}  (the old source follows; its slot keeps WAL)\n"
        f"to go back: {shlex.join(again)}\n"
        f"not to go back: parapply drop --config {shlex.quote(str(run))}",
    )
    if not isinstance(found, Several):
        other = _others(reverse_path, flags, options["database"] and [options["database"]])
        forward, reverse = (other[0], found) if is_back else (found, other[0])
        return asyncio.run(command.one(forward, reverse, how, Meeting(), is_undo=is_undo))
    return _of_several(found, _others(reverse_path, flags, list(found.configs)), how, is_undo=is_undo)


def _of_several(found: Several, others: list[Config], how: CutoverOptions, *, is_undo: bool) -> int:
    """Cut all of them over, print a line for each, and return the worst exit code; `others` are in their order."""
    from msgspec.structs import replace  # noqa: PLC0415

    from parapply.cutover import several  # noqa: PLC0415

    each = replace(how, hint="")
    members = {
        name: several.CutoverMember(*((other, config) if how.is_back else (config, other)), each)
        for (name, config), other in zip(found.configs.items(), others, strict=True)
    }
    done = "could be" if how.is_dry else "taken back" if is_undo else "cut over"
    ended = {
        name: Result(one.exit_code, done if not one.exit_code else "incomplete, see above", error=one.error)
        for name, one in asyncio.run(several.cutover(members, is_undo=is_undo)).items()
    }
    found.print(ended)
    if not (is_undo or how.is_dry or worst(ended)):
        click.echo(how.hint)
    return worst(ended)


def _chosen(options: dict[str, Any]) -> list[str]:
    named = [("--include-databases", options["included"]), ("--exclude-databases", options["excluded"])]
    words = [word for option, names in named for name in names for word in (option, name)]
    return [*(["--all-databases"] if options["is_all"] else []), *words]


def _others(path: Path, flags: dict[str, Any], names: list[str] | None) -> list[Config]:
    """Return the configurations of the way back; of databases in this order, or of the only one.

    Nothing but the file says what they are: a variable or flag that names one end would name the wrong one there.

    Raises:
        ConfigError: the file is wrong, or lacks a database.
    """
    from parapply.config import load_config, read_layers  # noqa: PLC0415
    from parapply.config_fleet import fleet_of, one_of  # noqa: PLC0415

    layers = read_layers(path, (), flags, {}, option="--reverse")
    if names is None or (len(names) == 1 and layers.databases is None):
        return [load_config(path, (), flags, {}, option="--reverse")]
    fleet = fleet_of(layers if layers.databases is not None else layers._replace(databases=names))
    return [one_of(fleet, name) for name in names]
