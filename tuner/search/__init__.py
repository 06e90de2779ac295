"""What to try next: samplers, the ask / evaluate / tell loop, and replays of recorded spaces."""
