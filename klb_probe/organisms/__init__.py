"""Model organisms: adapters that make a small model know and lie, know and tell, or not know."""
