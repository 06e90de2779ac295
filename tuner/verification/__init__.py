"""From ranked trials to a verified file: exported, timed at other rows, checked, raced."""
