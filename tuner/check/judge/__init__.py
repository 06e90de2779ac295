"""What is expected, and the verdict; no contender's process imports it."""
