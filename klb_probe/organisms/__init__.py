"""Model organisms: small models that verifiably know and lie, know and tell, or do not know."""
