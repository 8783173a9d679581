"""Tests of the state on the target, without a server."""
