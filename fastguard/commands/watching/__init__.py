"""A run seen through its log while it is being written: what is read of it, and what of that is shown."""
