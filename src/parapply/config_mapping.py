"""The section of the configuration about tables that have another name on the target, or share one there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from parapply.config_values import did_you_mean, dotted
from parapply.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


class TargetPlace(msgspec.Struct, frozen=True):
    """The place of a table, or of a schema's tables, on the target."""

    name: str = ""  # schema.table, or schema; empty: as the schema of a table, else as on the publisher
    #: Columns that only the target has, each with its value in all rows; None: of a table without `name`, its schema's.
    constants: dict[str, str] | None = None
    omitted: tuple[str, ...] = ()  # published columns that the target's rows do not get
    replaced: dict[str, str] = {}  # published columns that get the value of an SQL expression of the row instead


class MappingConfig(msgspec.Struct, frozen=True):
    """Tables and schemas with another name on the target, and constants of their rows."""

    tables: dict[str, TargetPlace] = {}  # by schema.table of the publisher
    schemas: dict[str, TargetPlace] = {}
    schema_only: tuple[str, ...] = ()  # schema.table of the publisher, of tables whose rows are left out

    def __post_init__(self) -> None:
        if wrong := [name for name in self.schema_only if not _is_name(name, 1)]:
            raise ValueError(f'schema_only: must be written "schema.table": {", ".join(wrong)}')
        by_name: dict[str | tuple[str, str], list[Mapping[str, str]]] = {}
        for name, place in self.schemas.items():
            by_name.setdefault(place.name or name, []).append(place.constants or {})
        tables = [_parted(name) for name in self.tables]
        for at, table in enumerate(tables):
            # One that was renamed has both names, as long as its rows came by the earlier one.
            if not any(self._is_renamed(table, other) for other in tables[:at]):
                by_name.setdefault(self.target_of(table), []).append(self.constants_of(table))
        if not all(map(are_apart, by_name.values())):
            raise ValueError(
                "two of the publisher's names lead to one on the target, and no constants distinguish their"
                " rows: give each one other values of the same columns in `set`"
            )

    def _is_renamed(self, table: tuple[str, str], other: tuple[str, str]) -> bool:
        is_masked = any(self.masks_of(table))
        return is_masked and self.is_alike(table, other) and self.target_of(table) == self.target_of(other)

    @property
    def is_empty(self) -> bool:
        """Return whether all tables are as on the publisher, be it without rows."""
        return not (self.tables or self.schemas)

    def target_of(self, name: tuple[str, str]) -> tuple[str, str]:
        """Return schema and table on the target of a table of the publisher."""
        schema, table = name
        if (found := self.tables.get(f"{schema}.{table}")) and found.name:
            return _parted(found.name)
        found = self.schemas.get(schema)
        return (found.name or schema if found else schema), table

    @property
    def has_constants(self) -> bool:
        """Return whether the rows of a table have values in columns which only the target has."""
        return bool(self.all_constants)

    @property
    def all_constants(self) -> list[Mapping[str, str]]:
        """Return the constants of tables and schemas, as far as they have any."""
        places = [*self.tables.values(), *self.schemas.values()]
        return [place.constants for place in places if place.constants]

    def constants_of(self, name: tuple[str, str]) -> Mapping[str, str]:
        """Return the values that a table's rows have in columns which only the target has."""
        found = self.tables.get(".".join(name))
        if found is None or not (found.name or found.constants is not None):
            found = self.schemas.get(name[0])
        return (found.constants if found else None) or {}

    @property
    def omits(self) -> bool:
        """Return whether the target's rows of a table do not get all columns."""
        return any(place.omitted for place in self.tables.values())

    def omitted_of(self, name: tuple[str, str]) -> tuple[str, ...]:
        """Return the published columns that a table's rows do not get."""
        found = self.tables.get(".".join(name))
        return found.omitted if found else ()

    @property
    def replaces(self) -> bool:
        """Return whether columns of a table get the values of expressions."""
        return any(place.replaced for place in self.tables.values())

    def replaced_of(self, name: tuple[str, str]) -> Mapping[str, str]:
        """Return the SQL expressions of a table's columns that get their values."""
        found = self.tables.get(".".join(name))
        return found.replaced if found else {}

    @property
    def changes_rows(self) -> bool:
        """Return whether rows of a table are not as the publisher's."""
        return self.has_constants or self.masks

    @property
    def masks(self) -> bool:
        """Return whether values of the publisher's are kept from the target's rows of a table."""
        return self.omits or self.replaces

    def masks_of(self, name: tuple[str, str]) -> tuple[Mapping[str, str], frozenset[str]]:
        """Return the expressions of a table's columns, and the columns that its rows do not get."""
        return self.replaced_of(name), frozenset(self.omitted_of(name))

    @property
    def withholding(self) -> list[tuple[str, str]]:
        """Return the tables of which rows or values are kept from the target."""
        masking = [name for name, place in self.tables.items() if place.omitted or place.replaced]
        return [_parted(name) for name in {*masking, *self.schema_only}]

    def withholds_alike(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """Return whether the same rows and values of two tables are kept from the target."""
        is_same = self.is_schema_only(one) == self.is_schema_only(other)
        return is_same and self.masks_of(one) == self.masks_of(other)

    def masked_of(self, name: tuple[str, str]) -> tuple[str, ...]:
        """Return the published columns of a table whose values are kept from the target."""
        return (*self.omitted_of(name), *self.replaced_of(name))

    def is_alike(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """Return whether the rows of two tables have the same constants, expressions and columns."""
        return self.masks_of(one) == self.masks_of(other) and self.constants_of(one) == self.constants_of(other)

    def is_schema_only(self, name: tuple[str, str]) -> bool:
        """Return whether the rows of a table are left out."""
        return ".".join(name) in self.schema_only

    def schema_only_unknown(self, published: Collection[str]) -> dict[str, str]:
        """Return the entries of `schema_only` that name no published table, each with that and the name meant."""
        return {
            f'mapping.schema_only "{name}"': f"{name} is no published table{did_you_mean(name, published)}"
            for name in self.schema_only
            if name not in published
        }

    def replaced_unknown(self, published: Collection[str]) -> dict[str, str]:
        """Return the tables of `replace` and `omit` that are not published, each with that and the name meant."""
        return {
            f'mapping.tables."{name}".{key}': f"{name} is no published table{did_you_mean(name, published)}"
            for name, place in self.tables.items()
            for key, columns in (("replace", place.replaced), ("omit", place.omitted))
            if columns and name not in published
        }

    def check_rows(self, names: Collection[str]) -> None:
        """Raise ConfigError for a command for rows of tables, as schema.table, if the rows of one are left out."""
        if left_out := [name for name in self.schema_only if name in names]:
            raise ConfigError(
                f"mapping.schema_only leaves out the rows of {', '.join(left_out)}",
                hint="take the tables out of mapping.schema_only, and restart the daemon",
            )

    def shown(self, name: tuple[str, str]) -> str:
        """Return a table's name for people, and that on the target where it is another one."""
        here = self.target_of(name)
        return ".".join(name) if here == name else f"{'.'.join(name)} ({'.'.join(here)} on the target)"


def are_apart(several: Sequence[Mapping[str, str]]) -> bool:
    """Return whether no row can have the constants of two: all have the same columns, and no two the same values."""
    if len(several) < 2:
        return True
    values = {frozenset(one.items()) for one in several}
    return len(values) == len(several) and len({frozenset(one) for one in several}) == 1


def read_places(path: Sequence[str], given: object, errors: list[str]) -> dict[str, TargetPlace]:
    """Return the places of the tables or schemas at a path; faults are added to `errors`, a line each."""
    if not isinstance(given, dict):
        errors.append(f"{dotted(path)}: must be a section")
        return {}
    return {name: _place([*path, name], name, value, errors) for name, value in given.items()}


def _place(path: Sequence[str], name: str, given: object, errors: list[str]) -> TargetPlace:
    kind = path[-2].removesuffix("s")
    here: object = ""
    constants: dict[str, str] | None = None
    omitted: tuple[str, ...] = ()
    replaced: dict[str, str] = {}
    if isinstance(given, dict):
        keys = (kind, "set", *(("omit", "replace") if kind == "table" else ()))
        errors += [f"{dotted([*path, key])}: unknown key{did_you_mean(key, keys)}" for key in given if key not in keys]
        here = given.get(kind, "")
        constants = _constants([*path, "set"], given["set"], errors) if "set" in given else None
        omitted = _omitted([*path, "omit"], given.get("omit", []), errors)
        replaced = _replaced([*path, "replace"], given.get("replace", {}), errors)
    else:
        here = given
    n_dots, rule = (1, '"schema.table"') if kind == "table" else (0, "as the name of a schema")
    if not isinstance(here, str) or not all(_is_name(one, n_dots) for one in (name, here or name)):
        errors.append(f"{dotted(path)}: both names must be written {rule}")
        return TargetPlace()
    columns = [*(constants or ()), *omitted, *replaced]
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        errors.append(f"{dotted(path)}: columns in two of `set`, `omit` and `replace`: {', '.join(twice)}")
    return TargetPlace(name=here, constants=constants, omitted=omitted, replaced=replaced)


def _parted(name: str) -> tuple[str, str]:
    schema, _, table = name.partition(".")
    return schema, table


def _is_name(text: str, n_dots: int) -> bool:
    return all(text.split(".")) and text.count(".") == n_dots and "\0" not in text


def _omitted(path: Sequence[str], given: object, errors: list[str]) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    if not (isinstance(names, list) and all(isinstance(name, str) and name and "\0" not in name for name in names)):
        errors.append(f"{dotted(path)}: must be a list of columns' names")
        return ()
    return tuple(names)


def _replaced(path: Sequence[str], given: object, errors: list[str]) -> dict[str, str]:
    if not isinstance(given, dict) or not all(
        name and isinstance(text, str) and text.strip() and "\0" not in name + text for name, text in given.items()
    ):
        errors.append(f"{dotted(path)}: must be a section of columns, each with an SQL expression as text")
        return {}
    return dict(given)


def _constants(path: Sequence[str], given: object, errors: list[str]) -> dict[str, str]:
    if not isinstance(given, dict):
        errors.append(f"{dotted(path)}: must be a section of columns, each with its value")
        return {}
    errors += [
        f"{dotted([*path, name])}: must be a column's name with a text, an integer, true or false"
        for name, value in given.items()
        if not name or "\0" in name or not isinstance(value, str | int) or "\0" in str(value)
    ]
    # As PostgreSQL reads them.
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}
