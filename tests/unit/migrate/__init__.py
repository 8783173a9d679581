"""Tests of `src/parapply/migrate`."""
