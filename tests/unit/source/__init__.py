"""Tests of `src/parapply/source`."""
