"""Scripts with planted faults, and what `fastguard try` says of them."""
