"""Tests of `src/parapply/target/state`."""
