"""Measured claims: each script appends JSON lines to ``results.jsonl``; predictions and outcomes are in ``RESULTS.md``."""
