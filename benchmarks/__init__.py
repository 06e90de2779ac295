"""Measurements that back docs/results.md; each module says its own command."""
