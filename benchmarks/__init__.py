"""Measurements that anyone can repeat, from the repository's root: `.venv/bin/python -m benchmarks.NAME --help`."""
