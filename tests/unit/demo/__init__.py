"""Tests of `src/parapply/demo`."""
