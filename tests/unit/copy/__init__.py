"""Tests of `src/parapply/copy`."""
