"""The alarms of config/docker/prometheus/alerts.yml: each one fires and goes out, as Prometheus itself evaluates them.

promtool is fed what the daemon's own `exposition` writes, one scrape a minute, so a renamed metric fails here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from parapply.metrics import table
from parapply.metrics.exposition import SlotFigures, exposition
from parapply.metrics.figures import Figures
from parapply.vocabulary import CommandOutcome, ConflictOutcome, ConflictType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from parapply.metrics.figures import Values

ROOT: Final = Path(__file__).parents[2]
ALERTS: Final = ROOT / "config" / "docker" / "prometheus" / "alerts.yml"
_TEXT: Final = ALERTS.read_text(encoding="utf-8")
#: Name and the rest of each alarm.
_RULES: Final = dict(re.findall(r"- alert: (\w+)\n(.*?)(?=\n +(?:- alert|#)|\Z)", _TEXT, re.DOTALL))
_OF_THE_PROCESS: Final = re.compile(r"(?m)^process_.*\n")
#: Minutes before the trouble, and after its end until the alarm must be out: the longest window of a rule and more.
_BEFORE_MIN: Final = 20
_AFTER_MIN: Final = 30
_PROMTOOL_TIMEOUT_S: Final = 60.0
#: A target that is late on purpose, and no later, is no trouble.
_DELAY_S: Final = 3600.0


@dataclass
class Shown:
    """Samples of a daemon in one scrape; `figures` outlives the scrape, as the daemon's own do."""

    figures: Figures
    values: Values = field(default_factory=dict)
    started_s: float = 1e9
    is_up: bool = True

    def quiet(self) -> None:
        """Show a daemon that has nothing to do but to wait for apply.delay_s."""
        self.is_up = True
        self.values = {
            table.READY: {(): 1},
            table.LAG_SECONDS: {(): _DELAY_S},
            table.DELAY: {(): _DELAY_S},
            table.LAG_BYTES: {(): 0},
            table.SLOT_RETAINED: {(): 1e6},
            table.SLOT_RETAINED_LIMIT: {(): 1e9},
            table.SLOT_SAFE: {(): 1e9},
            table.SLOT_WAL_STATUS: _wal_status("reserved"),
            table.PREPARED: {(): 0},
            table.LSN: {("lowest",): 1e15},
            table.BLOCKED_SECONDS: {(): 0},
            table.SESSION_BLOCKED: {("source",): 0, ("target",): 0},
            table.TABLES_WAITING: {(): 0},
            table.APPLYLOG_DROPPED: {(): self.values.get(table.APPLYLOG_DROPPED, {(): 0})[()]},
        }

    def samples(self) -> dict[str, float]:
        """Return the scrape, by the series as promtool names them."""
        if not self.is_up:
            return {_series("up", {}): 0.0}
        shown = self.figures.values() | self.values
        # Facts of this process change all the time, and no rule looks at them but for its start, which is set below.
        text = _OF_THE_PROCESS.sub("", exposition([SlotFigures("app", shown, self.figures.of_batches)]).decode())
        found = _parsed(text)
        return {**found, _series("up", {}): 1.0, _series("process_start_time_seconds", {}): self.started_s}


@cache
def _parsed(text: str) -> dict[str, float]:
    """Return the samples of an exposition; most minutes show what the one before has shown."""
    families = text_string_to_metric_families(text)
    return {_series(one.name, one.labels): one.value for family in families for one in family.samples}


class Trouble(NamedTuple):
    """Trouble of a daemon for some minutes, and the alerts that must fire at their end."""

    alerts: tuple[str, ...]
    minutes: int
    happens: Callable[[Shown, int], None]  # with the number of the minute, from 0
    before_min: int = _BEFORE_MIN


def _gauge(metric: table.Metric, number: float) -> Callable[[Shown, int], None]:
    def happens(shown: Shown, _minute: int) -> None:
        shown.values[metric] = {(): number}

    return happens


def _session_blocked(shown: Shown, _minute: int) -> None:
    shown.values[table.SESSION_BLOCKED] = {("source",): 121, ("target",): 0}


def _prepared(shown: Shown, _minute: int) -> None:
    _gauge(table.PREPARED, 1)(shown, 0)
    shown.values[table.LSN] = {("prepared",): 1e15, ("lowest",): 1e15}


def _prepared_by_turns(shown: Shown, minute: int) -> None:
    """Show another one each minute, and never none."""
    _gauge(table.PREPARED, 1)(shown, 0)
    shown.values[table.LSN] = {("prepared",): 1e15 + minute, ("lowest",): 1e15}


def _wal_status(status: str) -> dict[tuple[str, ...], float]:
    return {(one,): float(one == status) for one in table.WAL_STATUSES}


def _unlimited(shown: Shown, _minute: int) -> None:
    shown.values[table.SLOT_RETAINED] = {(): 11e9}
    del shown.values[table.SLOT_SAFE]


def _unreserved(shown: Shown, _minute: int) -> None:
    shown.values[table.SLOT_WAL_STATUS] = _wal_status("unreserved")
    del shown.values[table.SLOT_SAFE]


def _conflict(shown: Shown, minute: int) -> None:
    if minute == 0:
        shown.figures.count_conflict(ConflictType.UPDATE_MISSING, "public.t", ConflictOutcome.SKIPPED)


def _failed(shown: Shown, _minute: int) -> None:
    shown.figures.failures += 1


def _left_out(shown: Shown, minute: int) -> None:
    shown.figures.commands[CommandOutcome.LEFT_OUT] += minute == 0


def _left_again(shown: Shown, minute: int) -> None:
    shown.values[table.READY] = {(): minute % 2}


def _kept(shown: Shown, _minute: int) -> None:
    shown.figures.conflicts_kept[ConflictType.UPDATE_MISSING, ConflictOutcome.SKIPPED] = 8


def _mended(shown: Shown, _minute: int) -> None:
    """One that stopped the slot is repaired: none is new."""
    shown.figures.conflicts_kept[ConflictType.UPDATE_MISSING, ConflictOutcome.STOPPED] = 0
    shown.figures.conflicts_kept[ConflictType.UPDATE_MISSING, ConflictOutcome.REPAIRED] = 2


def _dropped(shown: Shown, _minute: int) -> None:
    shown.values[table.APPLYLOG_DROPPED] = {(): shown.values[table.APPLYLOG_DROPPED][()] + 7}


def _down(shown: Shown, _minute: int) -> None:
    shown.is_up = False


def _restarted(shown: Shown, minute: int) -> None:
    """Every other minute another process, which meets the same conflict again and ends."""
    shown.started_s += 60 * (minute % 2)
    shown.figures = Figures()
    shown.figures.count_conflict(ConflictType.INSERT_EXISTS, "public.t", ConflictOutcome.STOPPED)


_TROUBLES: Final = {
    "no answer": Trouble(("ParapplyDown",), 3, _down),
    "ends and is started again": Trouble(("ParapplyConflicts", "ParapplyRestarts"), 10, _restarted),
    "a slot of several fails": Trouble(("ParapplySlotFails",), 6, _failed),
    "an end is away": Trouble(("ParapplyNotReady",), 4, _gauge(table.READY, 0)),
    "serves and leaves again": Trouble(("ParapplyUnsteady",), 8, _left_again),
    "behind": Trouble(("ParapplyLag",), 7, _gauge(table.LAG_SECONDS, _DELAY_S + 301)),
    "a batch waits for a lock": Trouble(("ParapplyBlocked",), 3, _gauge(table.BLOCKED_SECONDS, 121)),
    "a session waits on the publisher": Trouble(("ParapplyBlocked",), 3, _session_blocked),
    "WAL is kept, without a limit": Trouble(("ParapplyRetainedWal",), 7, _unlimited),
    "more WAL is kept than allowed": Trouble(("ParapplyRetainedWal",), 7, _gauge(table.SLOT_RETAINED_LIMIT, 9e5)),
    "little WAL may still be kept": Trouble(("ParapplySlotAtRisk",), 2, _gauge(table.SLOT_SAFE, 1e5)),
    "the slot is about to be lost": Trouble(("ParapplySlotAtRisk",), 2, _unreserved),
    "the first conflict": Trouble(("ParapplyConflicts",), 2, _conflict),
    "a conflict that no counter has": Trouble(("ParapplyConflicts",), 2, _kept),
    "a conflict that is mended": Trouble((), 2, _mended),
    "a conflict before the first scrape": Trouble(("ParapplyConflicts",), 2, _conflict, before_min=0),
    "a command is left out": Trouble(("ParapplyCommandLeftOut",), 2, _left_out),
    "a forgotten prepared transaction": Trouble(("ParapplyPrepared",), 62, _prepared),
    "the same, from the first scrape on": Trouble(("ParapplyPrepared",), 62, _prepared, before_min=0),
    "a prepared transaction at the start": Trouble((), 30, _prepared, before_min=0),
    "prepared transactions that come and go": Trouble((), 70, _prepared_by_turns),
    "a table is published and not applied": Trouble(("ParapplyTablesWaiting",), 3, _gauge(table.TABLES_WAITING, 1)),
    "the apply log's disk is full": Trouble(("ParapplyApplyLog",), 3, _dropped),
}


def _series(name: str, labels: dict[str, str]) -> str:
    all_labels = {**labels, "job": "parapply", "instance": "parapply:9717"}
    return name + "{" + ",".join(f"{label}={json.dumps(text)}" for label, text in all_labels.items()) + "}"


def _scrapes(trouble: Trouble) -> list[dict[str, float]]:
    shown = Shown(Figures())
    shown.figures.conflicts_kept |= {
        (ConflictType.UPDATE_MISSING, outcome): n
        for outcome, n in ((ConflictOutcome.SKIPPED, 7), (ConflictOutcome.STOPPED, 1), (ConflictOutcome.REPAIRED, 1))
    }
    scrapes = []
    for minute in range(-trouble.before_min, trouble.minutes + _AFTER_MIN):
        shown.quiet()
        if 0 <= minute < trouble.minutes:
            trouble.happens(shown, minute)
        scrapes.append(shown.samples())
    return scrapes


def _values(scrapes: list[dict[str, float]], series: str) -> str:
    """Return the series as promtool reads it: what one scrape has and the next one lacks is stale."""
    words = []
    before: float | None = None
    for scrape in scrapes:
        now = scrape.get(series)
        words.append(("_" if before is None else "stale") if now is None else repr(now))
        before = now
    return " ".join(words)


def _firing(at_min: int, alerts: tuple[str, ...]) -> dict[str, object]:
    """Return a check of promtool that just these alarms fire."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(alerts)]
    return {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": f"{at_min}m",
        "exp_samples": samples,
    }


def _labelled(at_min: int, name: str) -> dict[str, object]:
    """Return a check of promtool that an alarm has every label that its summary names."""
    labels = ",".join(f'{label}!=""' for label in re.findall(r"\$labels\.(\w+)", _RULES[name]))
    expression = f'count(ALERTS{{alertname="{name}",alertstate="firing",{labels}}})'
    return {"expr": expression, "eval_time": f"{at_min}m", "exp_samples": [{"labels": "{}", "value": 1}]}


def _case(trouble: Trouble) -> dict[str, object]:
    scrapes = _scrapes(trouble)
    # The rules look at nothing else, and promtool takes longest over series.
    names = sorted({series for scrape in scrapes for series in scrape if series.partition("{")[0] in _TEXT})
    quiet = [_firing(trouble.before_min - 1, ())] if trouble.before_min else []
    last = trouble.before_min + trouble.minutes - 1
    labelled = [_labelled(last, name) for name in trouble.alerts]
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": _values(scrapes, series)} for series in names],
        "promql_expr_test": [*quiet, _firing(last, trouble.alerts), *labelled, _firing(len(scrapes) - 1, ())],
    }


def _promtool(path: Path, cases: Mapping[str, object]) -> None:
    path.write_text(json.dumps(cases), encoding="utf-8")  # JSON is YAML
    promtool = shutil.which("promtool") or "promtool"
    done = subprocess.run(
        [promtool, "test", "rules", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=_PROMTOOL_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alarm_has_a_trouble() -> None:
    """No alarm is without a test, and every summary says on what, and where the documents go on."""
    assert {name for trouble in _TROUBLES.values() for name in trouble.alerts} == set(_RULES)
    for name, rule in _RULES.items():
        assert "summary: " in rule, name
        assert "$labels." in rule, name


@pytest.mark.slow
@pytest.mark.prometheus
def test_an_alarm_fires_and_goes_out(tmp_path: Path) -> None:
    """Nothing fires before the trouble, just its alarms at its end, with the labels they name, and nothing later.

    One promtool looks at all troubles, each with series of its own.
    """
    cases = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [{"name": name, **_case(trouble)} for name, trouble in _TROUBLES.items()],
    }
    _promtool(tmp_path / "alerts_test.yml", cases)


@pytest.mark.prometheus
def test_the_page_has_expressions_that_prometheus_takes(tmp_path: Path) -> None:
    """All of docs/how-to/monitor.md; the one by names on the target keeps tables that have no other name there."""
    page = (ROOT / "docs" / "how-to" / "monitor.md").read_text(encoding="utf-8")
    found = re.findall(r"(?m)^\| [^|]+ \| `([^`]+)` \|$", page.partition("| question |")[2])
    assert len(found) > 5
    rules = [{"record": f"found_{number}", "expr": one} for number, one in enumerate(found)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "page", "rules": rules}]}), encoding="utf-8")
    series = {
        'parapply_rows_total{slot="s",table="a.b",operation="insert"}': "0+10x20",
        'parapply_rows_total{slot="s",table="(other)",operation="insert"}': "0+10x20",
        'parapply_table_target{slot="s",table="a.b",target="c.d"}': "1x20",
    }
    by_target = {
        "expr": next(one for one in found if one.startswith("sum by (target)")),
        "eval_time": "3m",
        "exp_samples": [{"labels": f'{{target="{name}"}}', "value": 1} for name in ("(other)", "c.d")],
    }
    case = {
        "interval": "10s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [by_target],
    }
    _promtool(tmp_path / "page_test.yml", {"rule_files": [str(tmp_path / "rules.yml")], "tests": [case]})


def test_an_alarm_of_events_uses_series_that_are_there_from_the_start() -> None:
    """A series whose increase a rule takes is 0 in the first scrape, as a series born at 1 has an increase of 0."""
    shown = Shown(Figures())
    shown.quiet()
    born = {series.partition("{")[0] for series, value in shown.samples().items() if value == 0}
    counters = {name for rule in _RULES.values() for name in re.findall(r"(?:rate|increase)\((\w+)", rule)}
    assert counters
    assert counters <= born
