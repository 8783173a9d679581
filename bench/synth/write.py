"""Apply logs of a stated shape, for trying the report without servers. Pure but for `write_logs`.

In: a `LogShape`. Out: files as the daemon writes them, byte for byte the same for the same shape. They are consistent
in themselves: a transaction's rows are in its batch's, times follow each other, a worker does one batch at a time,
commits keep the order. Each file is made by itself, so that several processes can share the work.
"""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from datetime import UTC, datetime
from multiprocessing import get_context
from typing import TYPE_CHECKING, Final

import msgspec

from bench.synth.records import BEGIN_S, FileRecords
from parapply.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench.synth.shape import LogShape
    from parapply.applylog_schema import Record

#: Records encoded at once.
_CHUNK: Final = 2_000


def write_logs(shape: LogShape, directory: Path, told: Callable[[int], None], processes: int | None = None) -> int:
    """Write the logs of a shape and return the number of records.

    Args:
        shape: of them.
        directory: is made if it is not there.
        told: called with the number of records of each file that is finished.
        processes: that share the work; as many as there are processors if None.

    Raises:
        ConfigError: the directory cannot be written, or has logs already.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.glob("apply-*")):
            raise ConfigError(f"{directory} holds an apply log already; name an empty directory with --out.")
        total = 0
        for n_records in _written(shape, directory, min(processes or os.cpu_count() or 1, shape.n_files)):
            told(n_records)
            total += n_records
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}.") from error
    return total


def _written(shape: LogShape, directory: Path, processes: int) -> Iterator[int]:
    if processes == 1:
        for number in range(shape.n_files):
            yield write_file(shape, directory, number)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        pending = {pool.submit(write_file, shape, directory, number) for number in range(shape.n_files)}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from [one.result() for one in done]


def write_file(shape: LogShape, directory: Path, number: int) -> int:
    """Write one file, the last under its final name only, and return its records.

    Raises:
        OSError: it cannot be written.
    """
    encoder = msgspec.json.Encoder()
    begun = datetime.fromtimestamp(BEGIN_S + shape.length_s * number / shape.n_files, UTC)
    final = directory / f"apply-{shape.slot}-{begun:%Y%m%dT%H%M%SZ}-1-{number}.jsonl"
    path = final.with_name(f"{final.name}.open")
    n_records = 0
    with path.open("wb") as stream:
        chunk: list[Record] = []
        for batch in FileRecords(shape, number).records():
            chunk += batch
            if len(chunk) >= _CHUNK:
                stream.write(encoder.encode_lines(chunk))
                n_records += len(chunk)
                chunk = []
        stream.write(encoder.encode_lines(chunk))
    path.rename(final)
    return n_records + len(chunk)
