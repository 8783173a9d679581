"""Tests of `src/parapply/conflict`."""
