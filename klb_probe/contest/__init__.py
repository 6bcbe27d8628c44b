"""A contest of lie detectors on three organisms whose knowledge is certain."""
