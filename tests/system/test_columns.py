"""Tables that differ between the sides, odd names and partitions, against the built-in subscription."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.fan import Fan, Fans, Variant
from tests.fixtures.rotation import values_of
from tests.system.column_cases import CASES, PUBLICATION, PUBLISHED_CASES

if TYPE_CHECKING:
    from tests.fixtures.servers import ServerPool

VARIANTS = (Variant(workers=4, mode="live"), Variant(workers=4, mode="backlog"))

pytestmark = pytest.mark.in_turn("variant")
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


@pytest.fixture(scope="module")
def fans(server_pool: ServerPool, request: pytest.FixtureRequest) -> Fans:
    """The cases with all tables published, run when first asked for."""

    def make(major: int) -> Fan:
        source, target = server_pool.get("source", major), server_pool.get("target", major)
        return Fan(source, target, CASES, values_of(request, "variant", major))

    return Fans(make)


@pytest.fixture
def fan(fans: Fans, pg_major: int) -> Fan:
    """The cases on this test's major version."""
    return fans.get(pg_major)


@pytest.fixture(scope="module")
def published_fans(server_pool: ServerPool, request: pytest.FixtureRequest) -> Fans:
    """The cases of column lists, row filters and publish_via_partition_root."""

    def make(major: int) -> Fan:
        source, target = server_pool.get("source", major), server_pool.get("target", major)
        variants = values_of(request, "variant", major)
        return Fan(source, target, PUBLISHED_CASES, variants, publication=PUBLICATION)

    return Fans(make)


@pytest.fixture
def published_fan(published_fans: Fans, pg_major: int) -> Fan:
    """The same on this test's major version."""
    return published_fans.get(pg_major)


@every_variant
def test_columns_are_matched_by_name(fan: Fan, variant: Variant) -> None:
    """Another order and dropped columns do not matter; columns only the target has take their defaults."""
    found = fan.check(variant, "other_order")
    assert '("from the target",15.0,b10!,,10,20)' in found["t"]


@every_variant
def test_values_go_where_their_text_can(fan: Fan, variant: Variant) -> None:
    """A column may have any type that reads the publisher's text: int to text or bigint, text to an enum, ..."""
    found = fan.check(variant, "other_types")
    assert "(10,7,,sad,z,,,,,,f,,,100)" in found["u"]


@every_variant
def test_t60_names_that_need_quotes(fan: Fan, variant: Variant) -> None:
    """Percent signs, braces, quotes, blanks, capitals and 63 bytes in names of schemas, tables and columns (T-60)."""
    fan.check(variant, 'S.p 1 "%s" {} ;--')


@every_variant
def test_t50_generated_columns(fan: Fan, variant: Variant) -> None:
    """A column generated on the source is not sent; one generated on the target is computed there (T-50)."""
    found = fan.check(variant, "generated")
    assert found["plain"] == ["(2,)", "(5,)"]


@every_variant
def test_t50_identity_columns(fan: Fan, variant: Variant) -> None:
    """Identity columns of both kinds take the source's values, also those that it chose itself (T-50)."""
    assert "(500,chosen!)" in fan.check(variant, "identity")["always"]


@every_variant
def test_t28_a_partitioned_target(fan: Fan, variant: Variant) -> None:
    """Rows find their partition and move between partitions, whatever the source's table is (T-28)."""
    found = fan.check(variant, "partitioned_target")
    assert len(found["low"]) + len(found["high"]) == len(found["t"]) > 0


@every_variant
def test_t28_partitions_published_by_themselves(fan: Fan, variant: Variant) -> None:
    """Without publish_via_partition_root each leaf is a table; a row that moves is a delete and an insert (T-28)."""
    assert fan.check(variant, "partitioned_both")["low"] == []


@every_variant
def test_tables_that_inherit(fan: Fan, variant: Variant) -> None:
    """A change of the parent is not one of its children, which are published by themselves."""
    fan.check(variant, "inherited")


@every_variant
def test_column_lists(published_fan: Fan, variant: Variant) -> None:
    """Columns left out of the publication take the target's defaults and are never changed."""
    found = published_fan.check(variant, "lists")
    assert all(",not sent," in row or ',"not sent",' in row for row in found["t"])


@every_variant
def test_row_filters(published_fan: Fan, variant: Variant) -> None:
    """A row that comes into the filter appears, one that leaves it goes."""
    found = published_fan.check(variant, "filtered")
    assert found["whole"] == ["(2,z)", "(5,y)"]


@every_variant
def test_t28_partitions_published_as_their_root(published_fan: Fan, variant: Variant) -> None:
    """With publish_via_partition_root the target may be partitioned in another way or not at all (T-28)."""
    assert published_fan.check(variant, "rooted")["finer"] == ["(after,1)"]
