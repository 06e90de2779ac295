"""What may vary: expressions, constraints, and the finite set of feasible configurations."""
