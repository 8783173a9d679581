"""The figures as Prometheus reads them: its text format, version 0.0.4 (prometheus.io, "Exposition formats").

Written by hand, because this runs on the leader's event loop: a thousand tables take about ten milliseconds, and a
sixth of a second by way of the official client, whose parser the tests use.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.metrics.table import METRICS, PROCESS_METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from parapply.metrics.figures import Histogram, Values
    from parapply.metrics.table import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PROC: Final = Path("/proc/self")


class SlotFigures(NamedTuple):
    """All that is measured of one slot."""

    slot: str  # its name, which every series has
    values: Values  # of counters and gauges
    histograms: Sequence[Histogram]  # as counted


def exposition(slots: Sequence[SlotFigures]) -> bytes:
    """Return the document of the slots of a process."""
    parts = [
        (f'slot="{_escaped(slot)}"', values, {histogram.metric: histogram for histogram in histograms})
        for slot, values, histograms in slots
    ]
    lines: list[str] = []
    for metric in METRICS:
        series: list[str] = []
        for own, values, by_metric in parts:
            if metric.kind == "histogram":
                series += _histogram(by_metric[metric], own) if metric in by_metric else ()
            else:
                series += _plain(metric, values.get(metric, {}), own)
        if series:  # else it is not counted by this command
            lines += [*_heading(metric), *series]
    numbers = _process()
    for metric in PROCESS_METRICS:
        if metric.name in numbers:
            lines += [*_heading(metric), f"{metric.name} {_number(numbers[metric.name])}"]
    return ("\n".join(lines) + "\n").encode()


def _heading(metric: Metric) -> tuple[str, str]:
    return f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"


def _plain(metric: Metric, found: Mapping[tuple[str, ...], float], own: str) -> Iterator[str]:
    name, labels = metric.name, metric.labels
    for key, number in found.items():
        more = "".join([f',{label}="{_escaped(text)}"' for label, text in zip(labels, key, strict=True)])
        yield f"{name}{{{own}{more}}} {_number(number)}"


def _histogram(histogram: Histogram, own: str) -> Iterator[str]:
    name = histogram.metric.name
    total = 0
    for bound, n in zip((*map(_number, histogram.metric.buckets), "+Inf"), histogram.counts, strict=True):
        total += n
        yield f'{name}_bucket{{{own},le="{bound}"}} {total}'
    yield f"{name}_sum{{{own}}} {_number(histogram.sum)}"
    yield f"{name}_count{{{own}}} {total}"


def _number(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)


def _escaped(text: str) -> str:
    if "\\" in text or '"' in text or "\n" in text:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return text


def _process() -> dict[str, float]:
    """Return the kernel's figures of this process (proc(5)) that can be read; none where no Linux is.

    Of /proc only this process's own directory is used: a service may see nothing else (ProcSubset=pid).
    """
    found: dict[str, float] = {}
    with suppress(OSError):
        fields = _fields()
        ticks_s = os.sysconf("SC_CLK_TCK")
        found["process_cpu_seconds_total"] = (int(fields[11]) + int(fields[12])) / ticks_s
        found["process_start_time_seconds"] = _started_s()
        found["process_virtual_memory_bytes"] = int(fields[20])
        found["process_resident_memory_bytes"] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        found["process_open_fds"] = len(os.listdir(_PROC / "fd"))  # noqa: PTH208  hundreds of Path objects
    with suppress(OSError):
        files = [line for line in (_PROC / "limits").read_text().splitlines() if line.startswith("Max open files")]
        if files and (limit := files[0].split()[3]).isdecimal():
            found["process_max_fds"] = int(limit)
    return found


def _fields() -> list[str]:
    # The name of the program, in parentheses, may hold blanks. The rest begins with the third field.
    return (_PROC / "stat").read_text().rpartition(")")[2].split()


@cache
def _started_s() -> float:
    """Return the start of this process, read once, because setting the clock must not look like a restart."""
    since_boot_s = int(_fields()[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s
