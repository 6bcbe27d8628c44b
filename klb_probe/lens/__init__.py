"""Lenses: decoders of a residual into a yes-minus-no logit margin."""
