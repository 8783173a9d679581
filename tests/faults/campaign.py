"""Rounds of faults until the time is over: what was injected, under how many transactions, and what was found.

In go servers and a seed; out come results by fault. The n-th round of a seed always draws the same settings and faults.
"""

from __future__ import annotations

import random
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tests.faults import last_faults, network_faults, process_faults, server_faults
from tests.faults.catalogue import FAULTS, Fault
from tests.faults.lab import Options, Round, draw_settings
from tests.faults.oracles import Findings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.faults.lab import Servers

__all__ = ["Campaign", "Result", "last_faults", "network_faults", "process_faults", "server_faults"]

_FAULTS_A_ROUND = 6
#: Part of the rounds in which the daemon is named as the publisher's synchronous standby.
_STANDBYS = 1 / 3


class Result(msgspec.Struct, kw_only=True):
    """Result of one fault."""

    fault: str
    title: str
    injected: int = 0
    transactions: int = 0  # acknowledged by the publisher while it was injected and healed
    lost: int = 0
    duplicated: int = 0
    torn: int = 0
    failures: int = 0  # of anything else: a leak, a hang, a wrong exit code
    longest_s: float = 0.0  # from the injection until everything was checked


@dataclass(kw_only=True)
class Campaign:
    """Runs rounds.

    Attributes:
        servers: to crash.
        seed: of everything.
        faults: to inject; those that cannot be run here are left out.
        tell: called with a line for a person when a fault has been injected and checked.
        environ: variables of every daemon.
        pace_s: pause of each client of the bank after a transaction.
        after_round: called after each round.
        results: by title.
        problems: one for each thing found: round, fault, text, log.
        rounds: settings and faults of each round.
        transactions: acknowledged by the publisher, all rounds together.
    """

    servers: Servers
    seed: str
    faults: Sequence[Fault]
    tell: Callable[[str], None]
    environ: Mapping[str, str] = field(default_factory=dict)
    pace_s: float = 0.03
    after_round: Callable[[], None] = lambda: None
    results: dict[str, Result] = field(default_factory=dict)
    problems: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    transactions: int = 0
    _whole: Findings = field(default_factory=Findings)

    @property
    def total(self) -> Findings:
        """Return what was found in all rounds."""
        return self._whole

    def run(self, until_s: float, *, first_round: int = 0, rounds: int | None = None) -> None:
        """Run rounds until a time of the monotonic clock, or a number of them; the last one is finished in order."""
        number = first_round
        while time.monotonic() < until_s and (rounds is None or number < first_round + rounds):
            self.run_round(number, self._deal(number), until_s)
            self.after_round()
            number += 1

    def _deal(self, number: int) -> list[Fault]:
        """Return the faults of a round: all come once before any comes again."""
        usual = [one for one in self.faults if not one.is_last and not one.why_not]
        last = [one for one in self.faults if one.is_last and not one.why_not]
        dealt = []
        if usual:
            # A short list would come whole in every round: give it once.
            a_round = min(_FAULTS_A_ROUND, len(usual))
            dealt = [_nth(usual, self.seed, number * a_round + n) for n in range(a_round)]
        if last:
            dealt.append(_nth(last, self.seed, number))
        return dealt

    def run_round(
        self, number: int, faults: Sequence[Fault], until_s: float, settings: Mapping[str, str | float] | None = None
    ) -> None:
        """Run one round with the faults given; what goes wrong is noted and ends it."""
        seed = f"{self.seed}/{number}"
        chooser = random.Random(seed)
        drawn = {**draw_settings(chooser), **(settings or {})}
        is_two_phase = chooser.random() < 0.5 or any(one.needs_two_phase for one in faults)
        is_standby = settings is None and chooser.random() < _STANDBYS
        options = Options(
            seed=seed, is_two_phase=is_two_phase, settings=drawn, environ=self.environ, is_standby=is_standby,
            pace_s=self.pace_s,
        )  # fmt: skip
        settings_of_round = {**drawn, "source.two_phase": is_two_phase, "is_standby": is_standby}
        self.rounds.append({"round": number, "settings": settings_of_round, "faults": []})
        self.tell(f"round {number}: " + ", ".join(f"{key.split('.')[1]}={value}" for key, value in drawn.items())
                  + f", two_phase={is_two_phase}, standby={is_standby}")  # fmt: skip
        try:
            with Round(self.servers, options) as run:
                try:
                    self._inject(run, number, faults, until_s)
                finally:
                    self.transactions += run.n_transactions
        except Exception as error:  # noqa: BLE001  the campaign goes on with the next round
            self._note(number, "begin or end of the round", Findings(other=1, texts=[repr(error)[:2000]]), "")

    def _inject(self, run: Round, number: int, faults: Sequence[Fault], until_s: float) -> None:
        run.work()
        for one in faults:
            if one.is_last or time.monotonic() > until_s:
                continue
            if not self._one(run, number, one, _and_check(one)):
                return
        rest = Fault(name="end", title="end of a round: everything compared", inject=_finish)
        if not self._one(run, number, rest, _finish):
            return
        for one in faults:
            if one.is_last and time.monotonic() <= until_s:
                self._one(run, number, one, one.inject)

    def _one(self, run: Round, number: int, one: Fault, act: Callable[[Round], Findings | None]) -> bool:
        """Inject and check; False if something was found, so that the round cannot go on."""
        began_s, before = time.monotonic(), run.n_transactions
        self.rounds[-1]["faults"].append(one.title)
        try:
            found = act(run) or Findings()
        except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
            text = "".join(traceback.format_exception(error))[-6000:]
            found = Findings(other=1, texts=[text])
        took_s = time.monotonic() - began_s
        result = self.results.setdefault(one.title, Result(fault=one.name, title=one.title))
        result.injected += 1
        result.transactions += run.n_transactions - before
        result.lost += found.lost
        result.duplicated += found.duplicated
        result.torn += found.torn
        result.failures += found.other
        result.longest_s = round(max(result.longest_s, took_s), 1)
        self.tell(
            f"  {one.name:4} {one.title}: {'FOUND ' + found.texts[0][-300:] if found else 'well'} ({took_s:.1f} s)"
        )
        if found:
            self._note(number, one.title, found, run.daemon.log_tail() + run.standing())
        return not found

    def _note(self, number: int, title: str, found: Findings, log: str) -> None:
        self._whole.take(found)
        self.problems.append({"round": number, "fault": title, "texts": found.texts, "log": log})


def _nth(faults: Sequence[Fault], seed: str, n: int) -> Fault:
    """Return the n-th card of an endless deck that holds every fault once in each run through it."""
    deal = list(faults)
    random.Random(f"{seed}/deck/{n // len(deal)}").shuffle(deal)
    return deal[n % len(deal)]


def _and_check(one: Fault) -> Callable[[Round], Findings]:
    def act(run: Round) -> Findings:
        found = one.inject(run) or Findings()
        found.take(run.check())
        return found

    return act


def _finish(run: Round) -> Findings:
    return run.finish()


def chosen(names: Sequence[str]) -> list[Fault]:
    """Return the faults of these names, all if there are none.

    Raises:
        KeyError: a name that no fault has.
    """
    for name in names:
        if not any(one.name == name for one in FAULTS):
            raise KeyError(name)
    return [one for one in FAULTS if not names or one.name in names]
