"""What is asked: each probe, and which of them say anything of a module."""
