"""The toolkit: what works without a guard."""
