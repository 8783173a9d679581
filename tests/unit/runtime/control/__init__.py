"""Tests of `src/parapply/runtime/control`."""
