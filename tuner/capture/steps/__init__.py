"""Steps of training: gradients recorded beside the forward, and the text of both."""
