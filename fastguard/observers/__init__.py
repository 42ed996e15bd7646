"""What the guard observes besides gradients: forward passes, the loss, activations, weights, the machine."""
