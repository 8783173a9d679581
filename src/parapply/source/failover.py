"""Failover slots (17 and later): standbys of the publisher keep a copy of the slot, so that a promotion leaves it.

The server keeps a daemon from getting ahead of its standbys only where `synchronized_standby_slots` names them; a new
primary that lacks what the target has is refused (`refusals.py`).

Source: PostgreSQL manual, "Replication Slot Synchronization", "ALTER_REPLICATION_SLOT".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from parapply.errors import SourceLost, SourceRefused
from parapply.source import slot
from parapply.source.options import check_slot_name

if TYPE_CHECKING:
    from parapply.config import SourceConfig
    from parapply.source.slot import Connection, SourceFacts

#: server_version_num of the first server with such slots.
_SINCE: Final = 170000
#: The same, whose standbys also learn from where on the slot sends prepared transactions.
_TWO_PHASE_SINCE: Final = 180000


def unprotected(facts: SourceFacts) -> str:
    """Return the causes that may keep a slot from surviving a failover, or that hold up its stream, for people.

    Empty if none can be seen here.
    """
    if facts.is_in_recovery:
        return "a slot on a standby cannot be a failover slot"
    if facts.server_version_num < _SINCE:
        return "failover slots need a publisher of PostgreSQL 17 or later"
    if not facts.synchronized_standby_slots:
        return (
            "synchronized_standby_slots is empty on the publisher: the target may get ahead of a standby, which is then"
            " refused after a failover"
        )
    if facts.standby_slots_unread:
        return (
            f"synchronized_standby_slots names {', '.join(facts.standby_slots_unread)}, which no standby reads: the"
            " stream waits for it, for ever if that standby is gone; correct the setting on the publisher"
        )
    return ""


def check(source: SourceConfig, facts: SourceFacts) -> None:
    """Refuse prepared transactions of a slot that is, or is to be, a failover slot of version 17.

    After a promotion one of before two_phase would come as a COMMIT PREPARED without its changes.
    """
    is_wanted = source.failover == "auto" and not facts.is_in_recovery
    is_failover = is_wanted or (facts.slot is not None and facts.slot.is_failover)
    if source.two_phase and is_failover and _SINCE <= facts.server_version_num < _TWO_PHASE_SINCE:
        raise SourceRefused(
            f"slot {source.slot!r} cannot be a failover slot and send prepared transactions before PostgreSQL 18: a"
            " standby of 17 does not know from where on it sends them, and loses changes when it is promoted",
            hint='set source.failover = "off"; take it from a slot that has it by ALTER_REPLICATION_SLOT name'
            " ( FAILOVER false ) on a replication connection, and run `parapply verify` if a standby was promoted",
        )


async def ensure(source: SourceConfig, facts: SourceFacts) -> SourceFacts:
    """Make the slot a failover slot if that is wanted and possible; return the facts as they are then.

    Raise SlotBusy if a process reads the slot, SourceRefused as `check`, or if the server does not take it.
    """
    check(source, facts)
    found, slot_name = facts.slot, source.slot
    is_possible = facts.server_version_num >= _SINCE and not facts.is_in_recovery
    if source.failover != "auto" or not is_possible or found is None or found.is_failover:
        return facts
    check_slot_name(slot_name)
    conn = await slot.connect(source.login, application_name=f"parapply failover {slot_name}", is_replication=True)
    async with conn:
        await check_same(conn, facts)
        with slot.source_errors(f"making the slot {slot_name!r} a failover slot"):
            await conn.execute(f'ALTER_REPLICATION_SLOT "{slot_name}" ( FAILOVER true )'.encode())
    return msgspec.structs.replace(facts, slot=msgspec.structs.replace(found, is_failover=True))


async def check_same(conn: Connection, facts: SourceFacts) -> None:
    """Make sure that a replication connection leads to the server that was checked: of several hosts it may be another.

    Raises:
        SourceLost: it does not, as while a standby is promoted; or the connection broke.
    """
    with slot.source_errors("identifying the publisher"):
        cursor = await conn.execute(b"IDENTIFY_SYSTEM")
        row = await cursor.fetchone()
    assert row is not None
    identifier, timeline = str(row[0]), int(row[1])
    if (identifier, timeline) != (facts.system_identifier, facts.timeline):
        raise SourceLost(
            f"two connections to the publisher lead to different servers: one is on timeline {facts.timeline}, the "
            f"other on timeline {timeline}"
        )
