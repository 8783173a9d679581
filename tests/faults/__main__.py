"""The fault campaign: `python -m tests.faults`, or `make faults FAULTS='--minutes 60 --seed 7'`."""

from __future__ import annotations

import platform
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from parapply import __version__
from tests.differential.cases import Cases, differential_servers
from tests.faults.campaign import Campaign, chosen
from tests.faults.catalogue import FAULTS, NOT_RUN
from tests.faults.lab import Servers, servers
from tests.faults.mutants import MUTANTS, environment

_EXAMPLES = """
\b
Examples:
  python -m tests.faults                                 an hour, all faults
  python -m tests.faults --minutes 15 --seed 7 --json out.json
  python -m tests.faults --only F3,F9 --minutes 5
  python -m tests.faults --seed 7 --round 12 --rounds 1  one round of that seed again
  python -m tests.faults --mutants                       five broken daemons, each must be found
  python -m tests.faults --random-share 0                without the random cases (tests.differential) in the end
"""


@click.command(epilog=_EXAMPLES)
@click.option("--minutes", default=60.0, show_default=True, help="How long; the round under way is finished.")
@click.option("--seed", default="1", show_default=True, help="Of settings, faults and load.")
@click.option("--round", "first_round", default=0, show_default=True, help="Number of the first round.")
@click.option("--rounds", type=int, help="Stop after this number.")
@click.option(
    "--random-share",
    default=0.2,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of the minutes for random cases: any tables and transactions, daemons killed.",
)
@click.option("--only", default="", help="Faults to inject, such as F3,F9.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here.")
@click.option("--mutants", is_flag=True, help="Break the daemon on purpose; each mutant must be found.")
@click.option("--list", "is_list", is_flag=True, help="Print the faults, and those that cannot be run here.")
def main(
    *,
    minutes: float,
    seed: str,
    first_round: int,
    rounds: int | None,
    random_share: float,
    only: str,
    json_path: Path | None,
    mutants: bool,
    is_list: bool,
) -> None:
    """Break daemon, servers and network under load, and look for lost, doubled and torn transactions.

    Ends with 1 if anything was found (with --mutants: if a mutant was not).
    """
    try:
        faults = chosen([name.strip() for name in only.split(",") if name.strip()])
    except KeyError as error:
        raise click.BadParameter(f"no fault {error.args[0]}; see --list", param_hint="--only") from None
    console = Console(stderr=True, soft_wrap=True)
    if is_list:
        _print_list()
        return
    with servers() as made:
        if mutants:
            sys.exit(_run_mutants(made, seed, console))
        began_s = time.monotonic()
        random_cases: Cases | None = None

        def write() -> None:
            if json_path:
                result = _as_json(campaign, time.monotonic() - began_s, made.source.binaries.version_text)
                if random_cases:
                    result["random"] = _random_as_json(random_cases)
                json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))

        campaign = Campaign(servers=made, seed=seed, faults=faults, tell=lambda _: None, after_round=write)
        try:
            duration_s = minutes * 60 * (1 - random_share)
            _with_progress(campaign, console, began_s, duration_s, first_round=first_round, rounds=rounds)
        finally:
            write()
        took_s = time.monotonic() - began_s
    # Not with faults or rounds that were chosen: they are looked at alone.
    if random_share and not only and rounds is None:
        with differential_servers() as servers_of:
            random_cases = Cases(
                servers_of=servers_of, majors=servers_of.majors, has_crashes=True,
                tell=lambda line: console.print(line, highlight=False, markup=False),
            )  # fmt: skip
            random_cases.run(random.Random(seed).randrange(1_000_000), began_s + minutes * 60)
        write()
    _print_results(campaign, took_s, Console(width=None if sys.stdout.isatty() else 150, soft_wrap=True))
    if random_cases:
        happened = ", ".join(f"{count} {name}" for name, count in random_cases.counts.items())
        click.echo(f"{random_cases.n_cases} random cases, {happened}: {len(random_cases.problems)} found")
    sys.exit(1 if campaign.total or (random_cases and random_cases.problems) else 0)


def _with_progress(
    campaign: Campaign, console: Console, began_s: float, duration_s: float, *, first_round: int, rounds: int | None
) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("faults", total=duration_s, counts="")

        def tell(line: str) -> None:
            progress.console.print(line, highlight=False, markup=False)
            injected = sum(one.injected for one in campaign.results.values())
            progress.update(
                task, completed=min(duration_s, time.monotonic() - began_s),
                counts=f"{injected} injected, {len(campaign.problems)} found",
            )  # fmt: skip

        campaign.tell = tell
        campaign.run(began_s + duration_s, first_round=first_round, rounds=rounds)


def _run_mutants(made: Servers, seed: str, console: Console) -> int:
    """Run a round with each mutant; return 1 if one was not found."""
    missed = []
    for name, mutant in MUTANTS.items():
        found = hunt(made, name, seed, lambda line: console.print(line, highlight=False, markup=False))
        click.echo(f"{name:14} {mutant.title}: {'found: ' + found[:200] if found else 'NOT FOUND'}")
        if not found:
            missed.append(name)
    return 1 if missed else 0


def hunt(made: Servers, name: str, seed: str, tell: object) -> str:
    """Run a round with a mutant and return what found it; empty if nothing did."""
    mutant = MUTANTS[name]
    faults = [next(one for one in FAULTS if one.name == wanted) for wanted in mutant.faults]
    campaign = Campaign(servers=made, seed=seed, faults=faults, tell=tell, environ=environment(name))  # type: ignore[arg-type]
    campaign.run_round(0, faults, time.monotonic() + 600, mutant.settings)
    return " ".join(campaign.problems[0]["texts"][0].split())[-500:] if campaign.problems else ""


def _print_list() -> None:
    for one in sorted(FAULTS, key=lambda one: int(one.name[1:])):
        click.echo(f"{one.name:4} {one.title}" + (f" -- cannot be run here: {one.why_not}" if one.why_not else ""))
    for name, why in NOT_RUN.items():
        click.echo(f"{name:4} -- not injected: {why}")


def _print_results(campaign: Campaign, took_s: float, console: Console) -> None:
    table = Table(title=f"{len(campaign.rounds)} rounds in {took_s / 60:.1f} minutes, seed {campaign.seed}")
    for name in ("fault", "", "injected", "transactions", "lost", "doubled", "torn", "other", "longest s"):
        table.add_column(name, justify="left" if name in {"fault", ""} else "right")
    for one in sorted(campaign.results.values(), key=lambda one: (len(one.fault), one.fault, one.title)):
        numbers = (one.injected, one.transactions, one.lost, one.duplicated, one.torn, one.failures, one.longest_s)
        table.add_row(one.fault, one.title, *map(str, numbers))
    console.print(table)
    for problem in campaign.problems:
        console.print(f"round {problem['round']}, {problem['fault']}:", *problem["texts"], problem["log"], sep="\n",
                      markup=False, highlight=False)  # fmt: skip
    found = campaign.total
    n_injected = sum(one.injected for one in campaign.results.values() if one.fault != "end")
    console.print(
        f"{n_injected} faults, {campaign.transactions} transactions: "
        f"lost {found.lost}, doubled {found.duplicated}, torn {found.torn}, other {found.other}"
    )


def _as_json(campaign: Campaign, took_s: float, server_version: str) -> dict[str, object]:
    found = campaign.total
    return {
        "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "parapply": __version__, "server": server_version,
        "python": platform.python_version(), "seed": campaign.seed, "minutes": round(took_s / 60, 1),
        "transactions": campaign.transactions, "lost": found.lost, "duplicated": found.duplicated, "torn": found.torn,
        "other": found.other, "injected": sum(one.injected for one in campaign.results.values() if one.fault != "end"),
        "results": list(campaign.results.values()), "problems": campaign.problems, "rounds": campaign.rounds,
        "not_run": {**NOT_RUN, **{one.name: one.why_not for one in FAULTS if one.why_not}},
    }  # fmt: skip


def _random_as_json(cases: Cases) -> dict[str, object]:
    problems = {str(seed): text for seed, text in cases.problems.items()}
    return {"cases": cases.n_cases, **cases.counts, "problems": problems}


if __name__ == "__main__":
    main()
