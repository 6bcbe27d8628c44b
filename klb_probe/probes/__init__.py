"""Linear probes on residuals of scenarios and rounds, with the controls they have to beat."""
