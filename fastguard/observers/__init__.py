"""Looks beside the gradients: forward passes, the loss, activations, weights, the machine. Each has a bound."""
