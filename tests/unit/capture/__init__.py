"""Tests of captured streams that need no server."""
