"""Steps of a migration and of a cut-over in words: the same on every screen. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parapply.amounts import brief

if TYPE_CHECKING:
    from collections.abc import Mapping


def step_state(step: Mapping[str, Any]) -> str:
    """Return the state of a step: one without a command that works on it does not run."""
    return "interrupted" if step["state"] == "running" and not step["is_worked_on"] else str(step["state"])


def how_far(step: Mapping[str, Any]) -> str:
    """Return the progress of a step of a migration, and its speed; of one that failed, the reason."""
    if step["state"] == "failed":
        return str(step["detail"])
    of = f" of about {step['total']:,}" if step["total"] else ""
    parts = [f"{step['done']:,}{of} {step['unit']}"] if step["unit"] else []
    if step["size_bytes"]:
        rate = step["size_bytes"] / max(step["seconds"], 1e-3)
        parts.append(f"{step['size_bytes'] / 1e6:,.0f} MB, {rate / 1e6:,.0f} MB/s")
    return ", ".join(parts)


def cutover_line(cutover: Mapping[str, Any]) -> str:
    """Return the step of a cut-over, in a line."""
    step, since = cutover["step"], brief(cutover["step_s"])
    where = "done" if step == "done" else f"{step} for {since}"
    gap = brief(cutover["gap_s"])
    if cutover["opened_at"]:
        where += f"; no client could write for {gap}"
    elif cutover["is_fenced"]:
        where += f"; no client can write on the source since {gap}"
    if cutover["paused"]:
        where += f"; clients wait at the poolers: {', '.join(cutover['paused'])}"
    if step != "done" and not cutover["is_worked_on"]:
        where += f"; interrupted: `parapply cutover{' --undo' if step == 'undoing' else ''}` goes on with it"
    return f"{where}; way back: slot {cutover['reverse_slot']}"
