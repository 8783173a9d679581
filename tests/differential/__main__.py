"""Random cases from the command line: `python -m tests.differential --minutes 10`, or `--seed 7` for one."""

from __future__ import annotations

import secrets
import sys
import time

import click

from tests.differential.case import MAJORS
from tests.differential.cases import PARTS, Cases, differential_servers
from tests.differential.schema import named_kinds, random_schema

_EXAMPLES = """
\b
Examples:
  python -m tests.differential --minutes 10              fresh seeds, daemons killed on the way
  python -m tests.differential --seed 7 --crashes        one case again
  python -m tests.differential --seed 7 --sql            its tables
  python -m tests.differential --kinds modified_key      one kind of tables
  python -m tests.differential --part policies --minutes 60
"""


@click.command(epilog=_EXAMPLES)
@click.option("--seed", type=int, help="Of the first case; fresh when it is left out. Alone: of the only one.")
@click.option("--minutes", type=float, help="Run cases with consecutive seeds for this time.")
@click.option("--crashes/--no-crashes", default=True, show_default=True, help="Kill daemons at random points.")
@click.option("--majors", default="", help="Versions to draw from, such as 18,15; all that are found.")
@click.option("--kinds", default="", help="Kinds of tables, such as family,keyed, instead of the seed's.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Run only this of each seed.")
@click.option("--sql", "is_sql", is_flag=True, help="Print what makes the tables, and run nothing.")
def main(
    *,
    seed: int | None,
    minutes: float | None,
    crashes: bool,
    majors: str,
    kinds: str,
    parts: tuple[str, ...],
    is_sql: bool,
) -> None:
    """Compare parapply with the built-in subscription on random tables and transactions, and policies with a model.

    Ends with 1 if a case differed.
    """
    only = [name.strip() for name in kinds.split(",") if name.strip()]
    if unknown := sorted(set(only) - named_kinds().keys()):
        raise click.BadParameter(f"no kind {unknown[0]}; there are {', '.join(named_kinds())}", param_hint="--kinds")
    chosen = [int(word) for word in majors.split(",") if word] or list(MAJORS)
    with differential_servers() as servers_of:
        found = [one for one in chosen if one in servers_of.majors]
        if not found:
            raise click.BadParameter(f"found only {servers_of.majors}", param_hint="--majors")
        cases = Cases(
            servers_of=servers_of, majors=found, has_crashes=crashes, only=only, tell=click.echo, parts=parts or PARTS
        )
        first = secrets.randbelow(1_000_000) if seed is None else seed
        if is_sql:
            case = cases.draw(first)
            schema = random_schema(first, servers_of(case.majors).features, case.only)
            click.echo(f"{case}\n-- publisher\n{schema.source_sql()};\n-- target\n{schema.target_sql()}")
            return
        cases.run(first, time.monotonic() + (minutes or 0) * 60)
    sys.exit(1 if cases.problems else 0)


if __name__ == "__main__":
    main()
