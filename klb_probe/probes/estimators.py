"""The estimators by name."""

from __future__ import annotations

from klb_probe.probes.ccs import Ccs
from klb_probe.probes.contrast_pairs import Lat
from klb_probe.probes.linear import Estimator
from klb_probe.probes.logistic import Logistic
from klb_probe.probes.mass_mean import MassMean, MeanDifference

ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator for estimator in (Logistic(), MeanDifference(), MassMean(), Lat(), Ccs())
}
