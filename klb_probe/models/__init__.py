"""Models: registry, loading, hook maps, chat text, the residual-stream protocol and its backends."""
