"""Benchmarks: `legato bench ...`, `legato capacity` and `legato profile`; command.py lists them."""
