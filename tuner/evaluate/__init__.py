"""Candidates to outcomes: the processes that run them, the clocks, checking and measuring."""
