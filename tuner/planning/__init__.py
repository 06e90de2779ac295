"""What a config amounts to: operator, device, feasible set, time, and what can be gained."""
