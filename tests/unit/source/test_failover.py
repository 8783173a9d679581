"""Failover slots and prepared transactions: refused where a promotion would lose changes without a word."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from parapply.config import load_config
from parapply.errors import SourceRefused
from parapply.source.failover import check
from tests.unit.source.test_refusals import FACTS, SLOT


@pytest.mark.parametrize(
    ("version_num", "failover", "is_failover", "is_refused"),
    [
        (160010, "auto", False, False),
        (170000, "auto", False, True),
        (179999, "auto", False, True),
        (170004, "off", True, True),
        (170004, "off", False, False),
        (180000, "auto", True, False),
    ],
)
def test_prepared_transactions_of_a_failover_slot_are_refused_before_version_18(
    version_num: int, failover: str, *, is_failover: bool, is_refused: bool
) -> None:
    """A standby of 17 gets no LSN from which on a slot sends them, so a COMMIT PREPARED would come without changes."""
    facts = replace(FACTS, server_version_num=version_num, slot=replace(SLOT, is_failover=is_failover))
    for two_phase in (True, False):
        flags = {
            "source.dsn": "host=a", "target.dsn": "host=b", "source.slot": "s", "source.publications": ("p",),
            "source.failover": failover, "source.two_phase": two_phase,
        }  # fmt: skip
        source = load_config(None, (), flags, {}).source
        if is_refused and two_phase:
            with pytest.raises(SourceRefused, match="before PostgreSQL 18"):
                check(source, facts)
        else:
            check(source, facts)
