"""Our figures against those of the baseline's own file: helpers/reference_figures.py."""

import json

import pytest
import reference_figures

import train_gpt


@pytest.mark.baseline
def test_figures_are_the_baselines():
    wanted = json.loads(reference_figures.REFERENCE.read_text())
    found = reference_figures.compute(train_gpt)
    assert list(reference_figures.differences(found, wanted)) == []
