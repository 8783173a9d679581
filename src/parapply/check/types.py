"""Rule for whether a column of the target takes every text that the publisher's type prints. Pure.

In: two types as format_type prints them. Doubt answers no, which is a warning and nothing else.
"""

from __future__ import annotations

import re
from typing import Final

_TYPE: Final = re.compile(r"(?P<base>[^(\[]+)(?:\((?P<modifier>[\d,-]+)\))?(?P<rest>[^(\[]*)(?P<array>(?:\[\])*)")
#: Types that take every text.
_ANY_TEXT: Final = frozenset({"text", "character varying"})
#: Types, each with the wider ones that take all its values if they have no length or precision.
_WIDER: Final = {
    "smallint": frozenset({"integer", "bigint", "numeric"}),
    "integer": frozenset({"bigint", "numeric"}),
    "bigint": frozenset({"numeric"}),
    "real": frozenset({"double precision"}),
    "cidr": frozenset({"inet"}),
}
#: Types whose larger modifier takes all values of a smaller one.
_SIZED: Final = frozenset({"character varying", "character", "bit varying"})


def takes_all(source: str, target: str) -> bool:
    """Return whether the target's type reads and keeps every value of the publisher's."""
    here, there = _TYPE.fullmatch(source), _TYPE.fullmatch(target)
    if here is None or there is None:
        return False
    # A modifier may be inside of the name: timestamp(3) without time zone.
    from_, to = here["base"] + here["rest"], there["base"] + there["rest"]
    if to in _ANY_TEXT and not there["modifier"] and not there["array"]:
        return True
    if here["array"] != there["array"]:
        return False
    if not there["modifier"]:
        return from_ == to or to in _WIDER.get(from_, ())
    return bool(from_ == to in _SIZED and here["modifier"] and int(here["modifier"]) <= int(there["modifier"]))
