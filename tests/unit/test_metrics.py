"""The table of metrics, what is counted into it, and the text that Prometheus reads; its own parser is the judge."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from parapply.metrics import table
from parapply.metrics.exposition import SlotFigures, exposition
from parapply.metrics.figures import Figures, cutover_values, migration_values
from parapply.vocabulary import CutoverStep

if TYPE_CHECKING:
    import pytest


def _samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def test_the_table_keeps_the_conventions() -> None:
    """Names are unique, in base units; counters, and only they, end in _total; help is one line."""
    names = [metric.name for metric in (*table.METRICS, *table.PROCESS_METRICS)]
    assert len(names) == len(set(names))
    for metric in table.METRICS:
        assert re.fullmatch(r"parapply_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
        assert "\n" not in metric.help
        assert "\\" not in metric.help
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert "slot" not in metric.labels
    declared = [value for value in vars(table).values() if isinstance(value, table.Metric)]
    assert set(declared) == set(table.METRICS)


def test_every_figure_is_read_back() -> None:
    """Counters, labels in their order, escaped names and histograms come out of Prometheus' parser as they went in."""
    figures = Figures()
    odd = 'public."a\\b\nc"'
    for name, n in ((odd, 3), ("public.plain", 4)):
        figures.tables[name].rows.update += n
        figures.tables[name].transactions += 1
    figures.tables["public.plain"].waits["foreign key"] += 2
    figures.tables["public.plain"].wait_s["foreign key"] += 0.25
    figures.barriers.waits["barrier"] += 1
    for _ in range(5):
        figures.count_conflict("update_missing", "public.plain", "skipped")
    figures.retries["40P01"] += 1
    transactions = figures.of_batches[0]
    for bucket, value in ((0, 1), (1, 2), (2, 3), (-1, 1e9)):
        transactions.counts[bucket] += 1
        transactions.sum += value
    found = _samples(exposition([SlotFigures('sl"ot', figures.values(), figures.of_batches)]))

    def at(name: str, **labels: str) -> float:
        return found[name, tuple(sorted({"slot": 'sl"ot', **labels}.items()))]

    assert at("parapply_rows_total", table=odd, operation="update") == 3
    assert at("parapply_rows_total", table=odd, operation="insert") == 0
    assert at("parapply_rows_total", table="public.plain", operation="update") == 4
    assert at("parapply_dependency_waits_total", table="public.plain", kind="foreign key") == 2
    assert at("parapply_dependency_wait_seconds_total", table="public.plain", kind="foreign key") == 0.25
    assert at("parapply_dependency_waits_total", table="", kind="barrier") == 1
    assert at("parapply_conflicts_total", type="update_missing", outcome="skipped") == 5
    assert at("parapply_conflicts_total", type="insert_exists", outcome="stopped") == 0
    assert at("parapply_table_conflicts_total", type="update_missing", table="public.plain", outcome="skipped") == 5
    assert at("parapply_retries_total", reason="40P01") == 1
    assert at("parapply_retries_total", reason="yield") == 0
    assert at("parapply_transactions_total", mode="streamed") == 0
    assert at("parapply_reconnects_total", end="target") == 0
    counts = [at("parapply_batch_transactions_bucket", le=le) for le in ("1", "2", "5", "20000", "+Inf")]
    assert counts == [1, 2, 3, 3, 4]
    assert at("parapply_batch_transactions_count") == 4
    assert at("parapply_batch_transactions_sum") == 1e9 + 6
    assert found["process_open_fds", ()] > 2


def test_a_service_that_sees_only_processes_has_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under systemd's ProcSubset=pid nothing but the directories of processes is in /proc: no figure needs more."""
    read = Path.read_text

    def hidden(self: Path, *args: str, **kwargs: str) -> str:
        if not str(self).startswith("/proc/self/"):
            raise FileNotFoundError(self)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", hidden)
    found = _samples(exposition([SlotFigures("s", {}, ())]))
    named = {"cpu_seconds_total", "start_time_seconds", "virtual_memory_bytes", "resident_memory_bytes", "open_fds"}
    assert {name for name, _ in found} >= {f"process_{each}" for each in named}
    assert time.time() - 86_400 < found["process_start_time_seconds", ()] < time.time()


def test_a_migration_and_a_cut_over_are_read_back() -> None:
    """Each step is in one state; an unknown value has no series; without a step neither has any series."""
    step = {"step": "copy", "state": "running", "seconds": 4.5, "done": 20, "total": 80, "unit": "rows",
            "size_bytes": 99, "left_s": 12.5}  # fmt: skip
    begun = {**step, "step": "follow", "unit": "", "total": 0, "size_bytes": 0, "left_s": None}
    gap = {"step": "draining", "reverse_slot": "back", "step_s": 1.5, "is_fenced": True, "gap_s": None}
    assert _samples(exposition([SlotFigures("s", migration_values([]) | cutover_values(None), ())])).keys() == {
        (metric.name, ()) for metric in table.PROCESS_METRICS
    }
    found = _samples(exposition([SlotFigures("s", migration_values([step, begun]) | cutover_values(gap), ())]))

    def at(name: str, **labels: str) -> float | None:
        return found.get((f"parapply_{name}", tuple(sorted({"slot": "s", **labels}.items()))))

    assert [at("migration_step", step="copy", state=state) for state in table.STEP_STATES] == [1, 0, 0]
    assert at("migration_step_seconds", step="copy") == 4.5
    assert at("migration_done", step="copy", unit="rows") == 20
    assert at("migration_expected", step="copy", unit="rows") == 80
    assert at("migration_bytes", step="copy") == 99
    assert at("migration_left_seconds", step="copy") == 12.5
    assert at("migration_left_seconds", step="follow") is None
    assert len([name for name, _ in found if name == "parapply_migration_done"]) == 1
    steps = {step: at("cutover_step", step=step, reverse_slot="back") for step in table.CUTOVER_STEPS}
    assert steps == {step: float(step == "draining") for step in CutoverStep}
    assert (at("cutover_step_seconds"), at("cutover_fenced"), at("cutover_gap_seconds")) == (1.5, 1.0, None)


def test_tables_are_bounded() -> None:
    """Beyond the limit all further tables share one series, so a publisher that makes tables for ever costs nothing."""
    figures = Figures()
    for number in range(table.TABLES_LIMIT + 50):
        figures.tables[f"public.t{number}"].rows.insert += 1
        figures.count_conflict("insert_exists", f"public.t{number}", "stopped")
    assert len(figures.tables) == table.TABLES_LIMIT + 1
    assert len(figures.changed) == table.TABLES_LIMIT
    assert figures.tables[table.OTHER_TABLES].rows.insert == 50
    assert figures.tables["public.t7"].rows.insert == 1
    assert len(figures.values()[table.TABLE_CONFLICTS]) == table.TABLES_LIMIT + 1
    assert figures.conflicts["insert_exists", "stopped"] == table.TABLES_LIMIT + 50
