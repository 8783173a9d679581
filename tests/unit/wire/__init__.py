"""Tests of `src/parapply/wire`."""
