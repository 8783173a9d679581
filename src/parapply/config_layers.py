"""The layers of the configuration as plain trees: a TOML file, the environment, ``--set`` texts.

In: texts. Out: nested dicts by section and key, not yet validated. Settings that cannot be read are appended to a list
of error lines, so that one run reports all of them. No value is ever repeated in a line, because it may be a secret.
"""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    #: The plain types, by name, of what may stand in the section at a path; empty where there is no such section.
    Fields = Callable[[Sequence[str]], dict[str, object]]

PREFIX = "PARAPPLY_"
#: Ends the name of a variable that names a file with the value, as services and containers get secrets.
_FILE_SUFFIX: Final = "_file"
_KEY = r'[A-Za-z0-9_-]+(\.([A-Za-z0-9_-]+|"[^"]+"))+'


def read_file(path: Path | None, errors: list[str], option: str) -> dict[str, Any]:
    """Return the file's tree; empty for None, and for a file that is named in `errors`, with the option."""
    if path is None:
        return {}
    import tomllib  # noqa: PLC0415  a hundredth of a start, only where there is a file

    try:
        with path.open("rb") as file:
            # Some editors put a byte order mark first.
            return tomllib.loads(file.read().removeprefix(codecs.BOM_UTF8).decode())
    except OSError as error:
        errors.append(f"{option}: cannot read {path}: {error.strerror}")
    except (ValueError, RecursionError) as error:  # Also of numbers too long, and tables too deep, for the parser.
        place = re.search(r"\(at .*\)$", str(error))  # only the place: the message can quote the line
        errors.append(f"{option}: {path} is not TOML {place.group() if place else ''}".rstrip())
    return {}


def read_environment(
    environ: Mapping[str, str], fields: Fields, errors: list[str]
) -> Iterable[tuple[list[str], object]]:
    """Yield path and value of each ``PARAPPLY_SECTION__KEY``.

    ``PARAPPLY_SECTION__KEY_FILE`` names a file that holds the value. Others are no configuration.
    """
    for name, text in environ.items():
        section, separator, key = name.removeprefix(PREFIX).lower().partition("__")
        if not name.startswith(PREFIX):
            continue
        if separator:
            parts = [section, *key.split("__")]
            base = [*parts[:-1], parts[-1].removesuffix(_FILE_SUFFIX)]
            if base == parts or base[-1] not in fields(base[:-1]):
                yield parts, _from_text(parts, text, fields)
            elif name[: -len(_FILE_SUFFIX)] in environ:
                errors.append(f"{name}: {name[: -len(_FILE_SUFFIX)]} is also set: only one of them may be")
            elif (content := _content(name, text, errors)) is not None:
                yield base, _from_text(base, content, fields)
        elif section.partition("_")[0] in fields(()) and "_" in section:
            errors.append(f"{name}: between section and key stand two underscores, as in PARAPPLY_SOURCE__DSN")


def _content(name: str, path: str, errors: list[str]) -> str | None:
    """Return the content of a variable's file, without the end of its last line; None for one named in `errors`."""
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        errors.append(f"{name}: cannot read {path}: {error.strerror}")
    except ValueError:  # Also a path with a NUL.
        errors.append(f"{name}: the file is not UTF-8 text")
    return None


def read_overrides(overrides: Sequence[str], fields: Fields, errors: list[str]) -> Iterable[tuple[list[str], object]]:
    """Yield path and value of each ``section.key=value``; a table's name is quoted: ``apply.tables."s.t".parallel``."""
    for number, override in enumerate(overrides, start=1):
        key, equals, text = override.partition("=")
        if not equals or not re.fullmatch(_KEY, key.strip()):
            # Do not repeat the text, because it may be a connection string.
            errors.append(f"--set (number {number}): must be section.key=value")
            continue
        parts = [part.strip('"') for part in re.findall(r'"[^"]+"|[^.]+', key.strip())]
        yield parts, _from_text(parts, text, fields)


def _from_text(parts: Sequence[str], text: str, fields: Fields) -> object:
    """Return the text as the type of its field; as it is where it does not fit, for the validation to name."""
    kind = fields(parts[:-1]).get(parts[-1])
    try:
        if kind is int or kind is float:
            return kind(text)
        if get_origin(kind) is tuple:
            parts = json.loads(text) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",")]
            return [int(part) if isinstance(part, str) else part for part in parts] if int in get_args(kind) else parts
        if int in get_args(kind):
            return int(text)  # a word where it is no number
        if kind is bool:
            return {"true": True, "false": False}.get(text.strip().lower(), text)
    except (ValueError, RecursionError):
        return text
    return text


def nest(entries: Iterable[tuple[list[str], object]]) -> dict[str, Any]:
    """Return the tree of paths and values; a later entry replaces an earlier one."""
    tree: dict[str, Any] = {}
    for parts, value in entries:
        node = tree
        for part in parts[:-1]:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[parts[-1]] = value
    return tree


def merged(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one tree of several, the highest layer first: it wins key by key."""
    tree: dict[str, Any] = {}
    for layer in reversed(layers):
        for key, value in layer.items():
            below = tree.get(key)
            tree[key] = merged([value, below]) if isinstance(value, dict) and isinstance(below, dict) else value
    return tree


def first_value(layers: Sequence[dict[str, Any]], parts: Sequence[str]) -> object:
    """Return the value of ``section.key`` in the first layer that has it, else None."""
    section, key = parts
    for layer in layers:
        values = layer.get(section)
        if isinstance(values, dict) and key in values:
            return values[key]
    return None
