"""The text of the module around a derived operator: its `ModelNew`."""
