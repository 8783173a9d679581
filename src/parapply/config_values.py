"""One value of the configuration: what it is written as, the rule it must keep, and how a breach is reported.

In: a value as TOML, the environment or a flag gives it. Out: the value of its field, or a line that names the field and
the rule, never the value: it may be a secret.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin

import msgspec
from psycopg import Error as DriverError
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from parapply.login import PasswordCommand

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

#: Target connections that apply, at most: each is one backend, and one stream cannot keep more of them busy.
WORKERS_LIMIT: Final = 64
#: The words of libpq for an unknown name in a connection string.
_UNKNOWN_PARAMETER: Final = re.compile(r'invalid (?:connection option|URI query parameter:) "(\w+)"')
#: An @ after the address of a URI.
_LATE_AT: Final = re.compile(r"postgres(?:ql)?://[^/?]*/[^?]*@")
_BARE = re.compile(r"[A-Za-z0-9_-]+")


class Address(NamedTuple):
    """Where to listen."""

    host: str  # empty: all addresses of the machine
    port: int  # 0: any free one

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Secret:
    """A text that no representation shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def get_secret_value(self) -> str:
        """Return the text itself."""
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        """Show that there is something, or nothing."""
        return f"Secret({'***' if self._text else ''})"


def dsn_parameters(text: str) -> dict[str, Any]:
    """Return the parameters of a connection string; raise ValueError with the rule that it breaks."""
    try:
        parameters: dict[str, Any] = conninfo_to_dict(text)
    except DriverError as error:
        # libpq quotes the text it stumbled over, which may be of the password: only what is nearly a name is repeated.
        if (unknown := _UNKNOWN_PARAMETER.match(str(error))) and (
            hint := did_you_mean(unknown[1], [one.keyword.decode() for one in Conninfo.get_defaults()])
        ):
            raise ValueError(f"unknown parameter {unknown[1]}{hint}") from None
        raise ValueError('must be a connection string: "host=... dbname=..." or postgresql://...') from None
    if "replication" in parameters:
        raise ValueError("must not name replication: parapply asks for it where it is needed")
    if _is_cut_wrong(text, parameters):
        raise ValueError("must name hosts, and ports by number; in a URI a password's @ is %40, and its / is %2F")
    return parameters


def _is_cut_wrong(text: str, parameters: Mapping[str, Any]) -> bool:
    """Return whether a part of the password may have become a host, a port or a database, which errors repeat."""
    hosts, ports = (str(parameters.get(key) or "").split(",") for key in ("host", "port"))
    # The name of a socket may begin with an @, and its directory may hold one.
    is_host_wrong = any("@" in host[1:] and not host.startswith("/") for host in hosts)
    is_port_wrong = any(port.strip() and not port.strip().isdecimal() for port in ports)
    return is_host_wrong or is_port_wrong or _LATE_AT.match(text) is not None


def _dsn(text: str) -> Secret:
    dsn_parameters(text)
    return Secret(text)


def has_password(dsn: Secret) -> bool:
    """Return whether a checked connection string holds a password itself."""
    return bool(conninfo_to_dict(dsn.get_secret_value()).get("password"))


def _command(text: str) -> PasswordCommand | None:
    # A text, because a variable, a file that one names, --set and TOML write it alike. Split as a shell does and run by
    # none, so that no character of it acts by accident; `sh -c '...'` is a shell.
    try:
        words = shlex.split(text)
    except ValueError:
        words = ["\0"]
    if any("\0" in word for word in words):
        raise ValueError("must be a program and its arguments, with spaces and quotes as in a shell")
    return PasswordCommand(words) if words else None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of a line about an unknown name: the known one that it resembles, or nothing."""
    import difflib  # noqa: PLC0415  for such lines only

    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _slot(name: str) -> str:
    # Source: manual, "Replication Slots": lower-case letters, digits and underscore, below NAMEDATALEN.
    if not re.fullmatch(r"[a-z0-9_]{0,63}", name):
        raise ValueError("must be 1 to 63 lower-case letters, digits or underscores")
    return name


def _schema(name: str) -> str:
    if not name or "\0" in name or len(name.encode()) > 63 or name.startswith("pg_"):
        raise ValueError("must be a schema name of 1 to 63 bytes that does not begin with pg_")
    return name


def _publications(names: tuple[str, ...]) -> tuple[str, ...]:
    if any(not name or b"\0" in name.encode() for name in names) or len(set(names)) != len(names):
        raise ValueError("must be a list of different publication names")
    return names


def _directory(text: str) -> Path | None:
    # TOML has no null, so the empty text means "off".
    return Path(text) if text else None


def _listen(text: str) -> Address | None:
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not colon or not is_port or (":" in host and not is_bracketed):
        raise ValueError('must be "host:port", "[address]:port" or ":port", the port from 0 to 65535')
    return Address(host[1:-1] if is_bracketed else host, int(port))


def _workers(given: int | str) -> int | str:
    if given != "auto" and not (isinstance(given, int) and 1 <= given <= WORKERS_LIMIT):
        raise ValueError(f"must be {_NOUNS[int | str]}")
    return given


#: Keys whose value is a rule of its own: what it is written as, and what makes the value of that or raises ValueError.
_CHECKED: Final[dict[str, tuple[object, Callable[[Any], object]]]] = {
    "source.dsn": (str, _dsn),
    "source.password_command": (str, _command),
    "source.slot": (str, _slot),
    "source.publications": (tuple[str, ...], _publications),
    "target.dsn": (str, _dsn),
    "target.password_command": (str, _command),
    "target.state_schema": (str, _schema),
    "cutover.poolers": (tuple[str, ...], lambda texts: tuple(map(_dsn, texts))),
    "cutover.pooler_target": (str, _dsn),
    "apply.workers": (int | str, _workers),
    "apply.spill_dir": (str, _directory),
    "applylog.directory": (str, _directory),
    "metrics.listen": (str, _listen),
}
_NOUNS: Final[dict[object, str]] = {
    str: "a text",
    int: "a whole number",
    int | str: f'a whole number from 1 to {WORKERS_LIMIT}, or "auto"',
    float: "a number",
    bool: "true or false",
    tuple[str, ...]: "a list of texts",
    tuple[int, ...]: "a list of whole numbers",
}


def read_value(path: list[str], kind: object, value: object, errors: list[str]) -> object:
    """Return the value as a field's type has it, or None and in `errors` a line with the rule that it breaks.

    The value is as TOML or a flag gives it, or the text of a variable, of which a number or list is made if the type is
    one.
    """
    written_as, check = _CHECKED.get(".".join(path), (kind, None))
    try:
        found = msgspec.convert(value, written_as)
        return check(found) if check else found
    except msgspec.ValidationError:
        errors.append(f"{dotted(path)}: {_rule(written_as)}")  # in our words: msgspec's repeat the value
    except UnicodeError:
        errors.append(f"{dotted(path)}: must be UTF-8")  # a variable of the environment may be any bytes
    except ValueError as error:
        errors.append(f"{dotted(path)}: {error}")
    return None


def plain_type(kind: object) -> object:
    """Return an annotation without its bounds."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _rule(kind: object) -> str:
    """Describe the values that a field of this type takes."""
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]  # a choice that may be left open
    if get_origin(kind) is Literal:
        *most, last = [repr(value) for value in get_args(kind)]
        return f"must be {', '.join(most)} or {last}"
    rule = f"must be {_NOUNS[plain_type(kind)]}"
    if get_origin(kind) is not Annotated:
        return rule
    bounds = get_args(kind)[1]
    return f"{rule} from {bounds.ge} to {bounds.le}" if bounds.le is not None else f"{rule} not below {bounds.ge}"


def dotted(path: Sequence[str]) -> str:
    """Return a path as TOML writes it."""
    return ".".join(part if _BARE.fullmatch(part) else json.dumps(part) for part in path)
