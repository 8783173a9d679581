"""Tests of `src/parapply/heal`."""
