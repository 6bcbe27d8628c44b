"""Signals: margins read from the residual stream, and what can be said about them."""
