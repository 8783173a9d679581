"""The runners that options ask for, with the names that tables and files give them. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bench.options import FAST, Disk
from parapply import hotpath

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.options import Options, Sync, System
    from bench.workloads import Workload

CEILING: Final = "pg_recvlogical"
BY_QUERY: Final = "read by query"
BUILT_IN: Final = "built-in"
BUILT_IN_PARALLEL: Final = "built-in parallel"
BULK: Final = "bulk statement"

_NAMES: Final[dict[System, str]] = {
    "built-in": BUILT_IN,
    "built-in-parallel": BUILT_IN_PARALLEL,
    "pglogical": "pglogical",
    "bulk-statement": BULK,
}
#: The daemon as it is installed, and with the interpreted twin of its hot path: begins of names, and variables.
_TWINS: Final[dict[System, tuple[str, Mapping[str, str]]]] = {
    "parapply": ("parapply", {}),
    "parapply-interpreted": ("parapply interpreted", {hotpath.VARIABLE: "forbid"}),
}


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A system that drains.

    Attributes:
        name: for people.
        system: what it is.
        settings: `key=value` for parapply.
        environment: variables for parapply, as a user sets them.
        delay_s: between daemon and target, in each direction.
        disk: of the subscriber.
    """

    name: str
    system: System
    settings: tuple[str, ...] = ()
    delay_s: float = 0.0
    disk: Disk = FAST
    environment: Mapping[str, str] = field(default_factory=dict)


def runners(workload: Workload, options: Options, sync: Sync) -> list[Runner]:
    """Return every runner that was asked for, once; without the bulk statement where it cannot do the workload."""
    found: list[Runner] = []
    for system in dict.fromkeys(options.systems):
        if system in _TWINS:
            found += _parapplies(system, workload, options, sync)
        elif system == "ceiling":
            found += [Runner(name=name, system=system) for name in (CEILING, BY_QUERY)]
        elif system != "bulk-statement" or workload.is_bulk_possible:
            found += [
                Runner(name=f"{_NAMES[system]}{disk.text}", system=system, disk=disk)
                for disk in dict.fromkeys(options.disks)
            ]
    return found


def _parapplies(system: System, workload: Workload, options: Options, sync: Sync) -> list[Runner]:
    twin, environment = _TWINS[system]
    # Twice the same runner would count as one.
    return [
        Runner(
            name=f"{twin} {order} {workers}" + (f", {delay_s * 1000:g} ms" if delay_s else "") + disk.text,
            system=system,
            environment=environment,
            settings=(
                f"apply.workers={workers}",
                f"apply.commit_order={order}",
                f"target.synchronous_commit={sync}",
                *workload.settings,
                *options.settings,
            ),
            delay_s=delay_s,
            disk=disk,
        )
        for order in dict.fromkeys(options.orders)
        for workers in dict.fromkeys(options.workers)
        for delay_s in dict.fromkeys(options.delays_s)
        for disk in dict.fromkeys(options.disks)
    ]
