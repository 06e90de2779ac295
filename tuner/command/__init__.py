"""The command line: `tune`, what it prints, and campaigns over many modules."""
