"""A contest of lie detectors on three organisms whose knowledge is certain: one knows and lies, one knows and tells, one does
not know and says what the liar says.

A detector is any function of a :class:`klb_probe.contest.rounds.ContestRound` that gives a number, higher for a more likely
knowing lie; what it learned, it learned elsewhere. As ``my_detector.py``::

    def score(one):
        return float(one.residuals["before_reply"][12] @ DIRECTION)

it enters by ``klb-probe contest --runs liar=...,honest=...,ignorant=... --detector my_detector.py:score``. It runs in the same
process, unfenced: the contest hides labels, and does not guard against a detector that goes looking for them.
"""
