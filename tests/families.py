"""The families that come with the tuner, each loaded once: that parses all its templates."""

from __future__ import annotations

import functools

from tuner.kernel.family import Family, load_family


@functools.cache
def built_in(name: str) -> Family:
    """Return the family of that name, which no test changes."""
    return load_family(name)
