"""What is tried on fastguard again and again, at random, and must never go wrong."""
