"""Tests of `src/parapply/runtime/observe`."""
