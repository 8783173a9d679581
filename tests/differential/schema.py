"""The tables of one random case, chosen by its seed so that a few seeds in a row draw every kind.

In go a seed and what the servers have; out come tables for both sides, the publication, and what to make on the target.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.differential import changing, exotic, families, kinds, partitions, sizes, trees
from tests.differential.types import types_sql

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.differential.tables import RandomTable
    from tests.differential.types import Feature

    Kind = Callable[[random.Random, frozenset[Feature]], list[RandomTable]]

#: As many seeds in a row draw every kind.
SEEDS_OF_ALL_KINDS = 3

# Neighbours go to different seeds.
_KINDS: tuple[Kind, ...] = (
    kinds.second_unique, kinds.partial_unique, kinds.expression_unique,
    families.family, kinds.hidden_unique, families.itself,
    kinds.full, kinds.keyless, kinds.twins,
    kinds.nulls_not_distinct, kinds.two_columns, kinds.deferrable_unique,
    kinds.exclusion, kinds.identity_index, partitions.on_target_only,
    exotic.no_identity, exotic.deferrable_key, exotic.other_key_on_target,
    exotic.identity_column, exotic.full_of_anything, exotic.generated_on_source,
    exotic.modified_key, exotic.enum_domain_key, exotic.alike_twins,
    kinds.computed, exotic.wide_key, exotic.many_columns,
    changing.shifted, changing.emptied, changing.altered,
    sizes.ends,
)  # fmt: skip
# Every ninth seed of a long run draws one of these alone. They take long, or their tables outnumber all others.
_ALONE: tuple[Kind, ...] = (sizes.many_tables, sizes.large_values)
_ALONE_EVERY = 9
#: Drawn only when it is named: the daemon stops, as it must, at a value that the publisher does not send.
_STOPPING: tuple[Kind, ...] = (exotic.filtered_big,)


@dataclass(frozen=True, kw_only=True)
class RandomSchema:
    """Tables and features of one case."""

    tables: Sequence[RandomTable]
    features: frozenset[Feature]
    is_via_root: bool  # partitions are published as their root

    def source_sql(self) -> str:
        """Return the statements that make everything on the publisher, the publication `pub` included."""
        tables = "".join(table.source_sql() for table in self.tables)
        options = f"publish_via_partition_root = {str(self.is_via_root).lower()}"
        return f"{self._types}{tables}CREATE PUBLICATION pub FOR {self._published} WITH ({options})"

    def target_sql(self) -> str:
        """Return the statements that make everything on a target."""
        return self._types + kinds.AUDIT + "".join(table.target_sql() for table in self.tables)

    @property
    def _types(self) -> str:
        schemas = "".join(f"CREATE SCHEMA {schema};\n" for schema in exotic.SCHEMAS)
        return schemas + types_sql(self.features)

    @property
    def _published(self) -> str:
        """A list of tables where it says more than ALL TABLES."""
        if any(table.listed or table.where for table in self.tables):
            return f"TABLE {', '.join(table.publication_sql() for table in self.tables)}"
        return "ALL TABLES"


def random_schema(seed: int, features: frozenset[Feature], only: Sequence[str] = ()) -> RandomSchema:
    """Return the schema of a seed: some tables with keys, a third of the odd kinds, and one more.

    Not all of them: some are applied serially, and hold up those that need not be. So there is an audit in one of two
    schemas only.

    Args:
        seed: of every choice.
        features: what both servers have.
        only: names of kinds to draw instead, besides the table of large transactions.

    Raises:
        KeyError: no kind has that name.
    """
    chooser = random.Random(f"schema {seed}")
    is_via_root = seed % 2 == 0
    if only:
        drawn = [named_kinds()[name] for name in only]
    else:
        drawn = [exotic.keyed]
        drawn += [kind for number, kind in enumerate(_KINDS) if (number + seed) % SEEDS_OF_ALL_KINDS == 0]
        drawn.append(chooser.choice([kind for kind in _KINDS if kind not in drawn]))
        drawn.append(partitions.by_root if is_via_root else partitions.by_leaves)
        drawn.append(trees.by_root if is_via_root else trees.by_leaves)
        if seed % SEEDS_OF_ALL_KINDS != 1:
            drawn.append(kinds.audited)
    tables = [table for kind in drawn for table in kind(chooser, features)]
    return RandomSchema(tables=[*tables, kinds.bulk()], features=features, is_via_root=is_via_root)


def drawn_alone(seed: int) -> tuple[str, ...]:
    """Return the name of the kind that long runs draw alone with a seed; mostly none."""
    return () if seed % _ALONE_EVERY else (_ALONE[seed // _ALONE_EVERY % len(_ALONE)].__name__,)


def named_kinds() -> dict[str, Kind]:
    """Return every kind by its name, those too that are not drawn otherwise."""
    every = (*_KINDS, *_ALONE, *_STOPPING, exotic.keyed, kinds.audited, partitions.by_root, partitions.by_leaves)
    return {kind.__name__: kind for kind in every} | {"root_trees": trees.by_root, "leaf_trees": trees.by_leaves}
