"""What to compute: the reference and its float64 oracle, inputs to ask with, how near is right."""
