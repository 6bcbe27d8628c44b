"""Fixtures that several test files share; the real model is loaded once."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(scope="session")
def smollm():
    """The default model, for real."""
    from klb_probe.models.load import load_model

    return load_model(device="cpu")


@pytest.fixture(scope="session")
def yes_no(smollm):
    """Its default contrast."""
    from klb_probe.lens.contrast import TokenContrast

    return TokenContrast.of(smollm.chat)
