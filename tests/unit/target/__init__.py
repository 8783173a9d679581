"""Tests of `src/parapply/target`."""
