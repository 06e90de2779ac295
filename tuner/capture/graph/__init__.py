"""A forward recorded on fake tensors, as a graph: plain data in a vocabulary of our own."""
