"""What is done to a module, and how both sides of a check do it: calls, lives, gradients."""
