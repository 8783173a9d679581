"""Statements that apply a change."""
