"""At how many rows a test's capture calls a forward: not at 65 numbers, a third of its CPU."""

from tuner.capture import rows_tried

__all__ = ["FEW_ROWS"]

FEW_ROWS = (1, 2, 3, 64, 1024, rows_tried.MANY_ROWS)
