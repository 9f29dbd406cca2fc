"""Benchmarks: every candidate is checked against its reference, then all are timed in turns. One file per command."""
