"""Options that commands share, and the configuration and structs that are made of options."""

from __future__ import annotations

import gc
import math
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from parapply import driver_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from parapply.config import Config
    from parapply.config_fleet import Fleet
    from parapply.model import Until

_Command = TypeVar("_Command", bound="Callable[..., Any]")
_Struct = TypeVar("_Struct")
_Decorator: TypeAlias = "Callable[[Callable[..., Any]], Callable[..., Any]]"


def together(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds several options in this order."""

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def taken(kind: type[_Struct], options: Mapping[str, Any], **more: Any) -> _Struct:
    """Return a struct, or a named tuple, of the options that have the names of its fields; None leaves the default."""
    fields = getattr(kind, "__struct_fields__", ()) or getattr(kind, "_fields", ())
    given = {name: options[name] for name in fields if options.get(name) is not None}
    return kind(**{**given, **more})


def seconds(name: str, field: str, text: str, *, default: float | None = None, least: float = 0) -> _Decorator:
    """Return an option of seconds; a default is shown unless it is for ever."""
    is_shown = default is not None and default < math.inf
    kind = click.FloatRange(min=least)
    return click.option(name, field, type=kind, default=default, show_default=is_shown, metavar="S", help=text)


def whole(name: str, text: str, default: int | None = None, *, least: int = 1, **more: Any) -> _Decorator:
    """Return an option of a whole number that shows its default; more arguments are click's."""
    kind = click.IntRange(min=least)
    return click.option(name, type=kind, default=default, show_default=default is not None, help=text, **more)


def connections(text: str, default: int = 4) -> _Decorator:
    """Return the option of the number of sessions."""
    return click.option("--connections", type=click.IntRange(1, 64), default=default, show_default=True, help=text)


def path_option(name: str, field: str, metavar: str, text: str, **of_path: Any) -> _Decorator:
    """Return an option that names a file or folder; more arguments are of click's type."""
    return click.option(name, field, metavar=metavar, type=click.Path(path_type=Path, **of_path), help=text)


def repeated(name: str, field: str, metavar: str, text: str, **more: Any) -> _Decorator:
    """Return an option that may be given several times; more arguments are click's."""
    return click.option(name, field, metavar=metavar, multiple=True, help=text, **more)


def switched_off(name: str, field: str, text: str) -> _Decorator:
    """Return a flag that makes true false."""
    return click.option(name, field, flag_value=False, default=True, help=text)


class Lsn(click.ParamType[int]):
    """An LSN as PostgreSQL prints it; becomes a number."""

    name = "lsn"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the LSN as a number, or fail as a usage error."""
        from parapply.model import parse_lsn  # noqa: PLC0415

        try:
            lsn = value if isinstance(value, int) else parse_lsn(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not 0 <= lsn < 1 << 64:
            self.fail(f"{value!r} is not an LSN like 16/B374D848", param, ctx)
        return lsn


class UntilType(click.ParamType["Until"]):
    """An LSN, or a time with its offset from UTC."""

    name = "lsn or time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Until:
        """Return where to end, or fail as a usage error."""
        from parapply.model import Until, parse_time  # noqa: PLC0415

        if isinstance(value, Until):
            return value
        if "/" in value:
            return Until(lsn=Lsn().convert(value, param, ctx))
        try:
            return Until(time_us=parse_time(value))
        except ValueError as error:
            self.fail(f"{error}; give an LSN like 16/B374D848 or a time like '2026-11-23 14:05:00+00'", param, ctx)


connection_options = together(
    click.option("--source", metavar="DSN", help="Publisher: connection string or URI."),
    click.option("--target", metavar="DSN", help="Subscriber: connection string or URI."),
    click.option("--slot", metavar="NAME", help="Replication slot on the publisher."),
    click.option("--publication", metavar="NAME", multiple=True, help="Publication to follow; repeatable."),
    click.option("--config", "config_path", metavar="FILE", type=click.Path(path_type=Path), help="TOML file."),
    click.option("--database", metavar="NAME", help="The one that is meant of a file of several databases."),
    click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Any key, e.g. apply.workers=8."),
)


@contextmanager
def light_start() -> Iterator[None]:
    """Import without the garbage collector: modules make many objects, and no garbage."""
    gc.disable()
    driver_versions.tell_own()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


copy_options = together(
    connections("Sessions of the copy, on each side."),
    click.option("--truncate", "truncates", is_flag=True, help="Empty tables that hold rows before the copy."),
    click.option(
        "--defer-indexes", "defers_indexes", is_flag=True, help="Drop indexes without a constraint, make them after."
    ),
)


def load(options: dict[str, Any], *not_needed: str) -> Config:
    """Return the configuration of one database."""
    from parapply.config_fleet import one_of  # noqa: PLC0415

    return one_of(load_all(options, *not_needed), options["database"])


def load_all(options: dict[str, Any], *not_needed: str) -> Config | Fleet:
    """Return the configuration, of several databases where the file names them."""
    from parapply.config import REQUIRED  # noqa: PLC0415
    from parapply.config_fleet import load as load_fleet  # noqa: PLC0415

    required = [key for key in REQUIRED if key not in not_needed]
    return load_fleet(options["config_path"], options["overrides"], flags_of(options), os.environ, required=required)


def flags_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are options, by their keys; None: not given. `flags`: options of one command only."""
    return {
        "source.dsn": options["source"],
        "target.dsn": options["target"],
        "source.slot": options["slot"],
        "source.publications": options["publication"],
        **options.get("flags", {}),
    }
