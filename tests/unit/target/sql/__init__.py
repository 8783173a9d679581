"""Tests of `src/parapply/target/sql`."""
