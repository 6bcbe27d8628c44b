"""Signals of played rounds beside what the judge found in them: joined, tested, compared with simpler readouts, drawn."""
