"""The texts of `report --what-if`: settings and costs that are to be others than the log's."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from parapply.analysis.contention import MOST

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
        """Return it as it is asked."""
        values = msgspec.to_builtins(self).items()
        return ",".join(f"{name}={f'{value:g}' if isinstance(value, float) else value}" for name, value in values)


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
