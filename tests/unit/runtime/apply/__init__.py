"""Tests of `src/parapply/runtime/apply`."""
