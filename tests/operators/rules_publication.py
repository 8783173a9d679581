"""Changes of a publication: tables leave and come back, filters, actions, recreation."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.operators.rules_base import PICK, OneStream


class Publications(OneStream):
    """Rules about the publication `pub`."""

    #: As it was made.
    publication_sql: str = ""
    is_named: bool = False
    is_gone: bool = False
    is_changed: bool = False
    begins_via_root: str = "false"

    def publication(self, name: str, text: str) -> None:
        """Do a step that changes the publication."""
        self.is_changed = True
        if self.world is not None:
            self.world.is_altered = True
        self.step(name, lambda world: world.on_source(text))

    @rule(pick=PICK)
    def unpublish(self, pick: int) -> None:
        """A table leaves."""
        if self.is_named:
            text = f"ALTER PUBLICATION pub DROP TABLE ONLY {self.table(pick)}"
            self.publication("publication without a table", text)

    @rule(pick=PICK)
    def publish(self, pick: int) -> None:
        """A table comes, or comes back."""
        if self.is_named:
            text = f"ALTER PUBLICATION pub ADD TABLE ONLY {self.table(pick)}"
            self.publication("publication with a table", text)

    @rule(limit=st.sampled_from([4, 100000]), pick=PICK)
    def filter(self, pick: int, limit: int) -> None:
        """The rows of a table are chosen."""
        if not self.is_named:
            return
        others = ", ".join(f"ONLY {name}" for name in self.tables if name != self.table(pick))
        text = f"ALTER PUBLICATION pub SET TABLE ONLY {self.table(pick)} WHERE (id < {limit})"
        self.publication("row filter", f"{text}, {others}" if others else text)

    @rule(actions=st.sampled_from(["insert", "insert, update", "insert, update, delete, truncate"]))
    def actions(self, actions: str) -> None:
        """Change the published actions."""
        if self.world is not None and "delete" not in actions:
            self.world.is_narrowed = True
        text = f"ALTER PUBLICATION pub SET (publish = '{actions}')"
        self.publication("published actions", text)

    @precondition(lambda self: not self.is_gone)
    @rule()
    def drop_publication(self) -> None:
        """It is gone."""
        self.is_gone = True
        self.publication("no publication", "DROP PUBLICATION pub")

    @precondition(lambda self: self.is_gone)
    @rule()
    def make_publication(self) -> None:
        """It is made again."""
        self.is_gone = False
        self.publication("publication made", self.publication_sql)

    @rule(is_on=st.booleans())
    def via_root(self, is_on: bool) -> None:
        """Rows of partitions come under the root's name, or not."""
        text = f"ALTER PUBLICATION pub SET (publish_via_partition_root = {str(is_on).lower()})"
        self.publication("via root", text)
