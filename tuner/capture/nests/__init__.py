"""Loop nests: the nodes of a graph that one pass over rows and columns computes."""
