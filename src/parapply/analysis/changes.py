"""The texts of `report --what-if`: settings and costs that are to be others than the log's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta

from parapply.analysis.contention import MOST

if TYPE_CHECKING:
    from collections.abc import Mapping

Order = Literal["preserve", "relaxed"]
ORDERS: Final[tuple[Order, ...]] = ("preserve", "relaxed")
_Size = Annotated[int, Meta(ge=1, le=1 << 40)]


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The changes of one question; None changes nothing."""

    workers: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    order: Order | None = None
    batch_transactions: _Size | None = None  # at most, as the next two
    batch_changes: _Size | None = None
    batch_bytes: _Size | None = None
    target_speed: Annotated[float, Meta(ge=0.01, le=100)] = 1.0  # factor by which statements take less time
    synchronous_commit: Literal["on", "off"] | None = None
    flush_ms: Annotated[float, Meta(ge=0, le=10_000)] | None = None  # a flush; None: as in the log

    def __str__(self) -> str:
        values = msgspec.to_builtins(self).items()
        return ",".join(f"{name}={f'{value:g}' if isinstance(value, float) else value}" for name, value in values)


#: The settings of a daemon that a change can have, by its keys.
SETTINGS: Final = {
    "workers": "apply.workers",
    "order": "apply.commit_order",
    "batch_transactions": "apply.max_batch_transactions",
    "batch_changes": "apply.max_batch_changes",
    "batch_bytes": "apply.max_batch_bytes",
    "synchronous_commit": "target.synchronous_commit",
}

#: The value that each key takes, in words.
VALUES: Final = {
    "workers": f"a number from 1 to {MOST}",
    "order": "preserve or relaxed",
    "batch_transactions": "a number above 0",
    "batch_changes": "a number above 0",
    "batch_bytes": "a number above 0",
    "target_speed": "a factor from 0.01 to 100",
    "synchronous_commit": "on or off",
    "flush_ms": "milliseconds from 0 to 10000",
}


def change_between(pairs: Mapping[str, str]) -> Change:
    """Return the change that settings ask for.

    Args:
        pairs: values by setting, such as ``apply.workers``, that differ from a log's.

    Raises:
        ValueError: says in words for people which of them no log can answer.
    """
    keys = {setting: key for key, setting in SETTINGS.items()}
    if unknown := sorted(pairs.keys() - keys.keys()):
        raise ValueError(f"{unknown[0]} cannot be predicted, only {', '.join(sorted(keys))}")
    return read_change(",".join(f"{keys[setting]}={value}" for setting, value in pairs.items())) if pairs else Change()


def read_change(text: str) -> Change:
    """Return the changes that a text such as ``workers=8,order=relaxed`` asks for.

    Raises:
        ValueError: says in words for people why it asks for nothing.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        name, is_pair, value = part.strip().partition("=")
        if not is_pair or name not in VALUES:
            raise ValueError(f"{part.strip()!r} is no KEY=VALUE with one of the keys {', '.join(VALUES)}")
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = value
    try:
        return msgspec.convert(values, Change, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).partition(" - at `$.")[2].rstrip("`")
        raise ValueError(f"{name}={values[name]}: {name} is {VALUES[name]}") from error
