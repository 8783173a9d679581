"""Schemas with parapply's tables, on either end: never copied, compared, emptied or applied.

A publisher has one if it is, or was, a target itself: a publication FOR ALL TABLES then sends its tables. Their rows
are true of that server only; on another one they would replace the state of its slots. The queue of commands is also
such a table: the stream carries its rows, and none of them becomes a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import LiteralString

#: The COMMENT ON SCHEMA of a state schema.
STATE_COMMENT: Final[LiteralString] = "Progress of parapply, which applies logical replication here."

#: Subquery for FROM: schema_name of each such schema of the database, a state schema whatever its name is. It is known
#: by an index that every version has and nothing else, and by marks that only the schema's owner could set: a comment
#: or tables. A role that may only create tables there could otherwise have all others of the schema left out. An index
#: of the catalogue is used, so that its time does not grow with tables.
STATE_SCHEMAS_SQL: Final[LiteralString] = """
(SELECT n.nspname AS schema_name
   FROM pg_catalog.pg_class AS mark
   JOIN pg_catalog.pg_index AS i ON i.indexrelid = mark.oid
   JOIN pg_catalog.pg_class AS c ON c.oid = i.indrelid AND c.relname = 'schema_version'
   JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  WHERE mark.relname = 'schema_version_one_row'
    AND (c.relowner = n.nspowner
         OR pg_catalog.obj_description(n.oid, 'pg_namespace') = 'SAID')
  UNION
 SELECT n.nspname
   FROM pg_catalog.pg_class AS mark
   JOIN pg_catalog.pg_index AS i ON i.indexrelid = mark.oid
   JOIN pg_catalog.pg_class AS c ON c.oid = i.indrelid AND c.relname = 'ddl_queue'
   JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = 'parapply'
  WHERE mark.relname = 'ddl_queue_id')
""".replace("SAID", STATE_COMMENT)
