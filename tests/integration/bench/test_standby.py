"""A publisher whose commits wait for a system: everything that `parapply bench --synchronous` does, in short."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bench.attached import System
from bench.standby import LEVELS, Standby, StandbyOptions, measure
from parapply.demo.stage import Interrupts, Stage

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.slow

_OPTIONS = StandbyOptions(
    standbys=(
        Standby(system=System(name="ours", settings=("apply.workers=2",)), sync="off"),
        Standby(system=System(name="built-in", sync="on"), sync="on"),
    ),
    clients=(1,),
    seconds=1,
    warm_up_s=1,
    rounds=1,
    scale=1,
)


def test_each_standby_is_waited_for_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every standby has its figures, and afterwards the publisher names no standby.

    pgbench goes slowly: as fast as it can, it would keep the machine busy for six seconds.
    """
    with Interrupts() as interrupts, Stage(interrupts, name="test", settings={"fsync": "off"}) as stage:
        run = stage.source.run

        def slowly(program: str, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401
            return run(program, *words, *(["--rate=50"] if "--no-vacuum" in words else []), **more)

        monkeypatch.setattr(stage.source, "run", slowly)
        turns = measure(stage, _OPTIONS)
        assert stage.source.execute("SHOW synchronous_standby_names") == [("",)]
    assert [(turn.standby, turn.level) for turn in turns] == [
        (name, level) for name in ("ours", "built-in") for level in LEVELS
    ]
    assert all(turn.per_s > 0 for turn in turns)
    assert {role for turn in turns for role in turn.cpu_us} >= {"leader", "walsender", "target"}
