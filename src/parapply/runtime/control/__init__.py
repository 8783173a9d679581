"""Durability, reports to the publisher, and requests of commands."""
