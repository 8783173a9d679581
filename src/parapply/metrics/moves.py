"""Values of the metrics of a migration and of a cut-over. Pure; the records come from the state tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parapply.metrics import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from parapply.metrics.figures import Values


def migration_values(steps: Iterable[Mapping[str, Any]]) -> Values:
    """Return the gauges of the steps that were begun; none without a migration."""
    values: Values = {
        table.MIGRATION_STEP: {},
        table.MIGRATION_SECONDS: {},
        table.MIGRATION_DONE: {},
        table.MIGRATION_EXPECTED: {},
        table.MIGRATION_BYTES: {},
        table.MIGRATION_LEFT: {},
    }
    for one in steps:
        step = one["step"]
        for state in table.STEP_STATES:
            values[table.MIGRATION_STEP][step, state] = float(one["state"] == state)
        values[table.MIGRATION_SECONDS][step,] = one["seconds"]
        if one["unit"]:
            values[table.MIGRATION_DONE][step, one["unit"]] = one["done"]
            if one["total"]:
                values[table.MIGRATION_EXPECTED][step, one["unit"]] = one["total"]
        if one["size_bytes"]:
            values[table.MIGRATION_BYTES][step,] = one["size_bytes"]
        if one["left_s"] is not None:
            values[table.MIGRATION_LEFT][step,] = one["left_s"]
    return values


def cutover_values(found: Mapping[str, Any] | None) -> Values:
    """Return the gauges of a cut-over; none before the first one."""
    if found is None:
        return {}
    slot = found["reverse_slot"]
    return {
        table.CUTOVER_STEP: {(step, slot): float(step == found["step"]) for step in table.CUTOVER_STEPS},
        table.CUTOVER_STEP_SECONDS: {(): found["step_s"]},
        table.CUTOVER_FENCED: {(): float(found["is_fenced"])},
        table.CUTOVER_GAP: {} if found["gap_s"] is None else {(): found["gap_s"]},
    }
