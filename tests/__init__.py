"""Tests of parapply."""
