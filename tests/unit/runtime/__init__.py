"""Tests of `src/parapply/runtime`."""
