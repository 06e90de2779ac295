"""A probe's question, drawn: weights, inputs, special values, the script."""
