import matplotlib
import numpy as np
import pytest

from rtk import usage
from rtk.errors import TraceError

matplotlib.use("Agg")


def test_heatmap_shows_the_models_layer_numbers_and_loads(trace):
    ax = usage.heatmap(trace, title="two layers")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "3"]
    drawn = np.asarray(ax.collections[0].get_array()).reshape(2, 4)
    np.testing.assert_allclose(drawn, [[2, 1.5, 0, 0.5], [0.5, 1, 1.5, 1]])
    assert ax.get_title() == "two layers"


def test_heatmap_of_one_layer(trace):
    ax = usage.heatmap(trace, layers=[3])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["3"]
    with pytest.raises(TraceError, match=r"\[2\].*MoE layers are \[1, 3\]"):
        usage.heatmap(trace, layers=[2])


def test_heatmaps_share_one_colour_scale(trace):
    figure = usage.heatmaps({"both": [trace], "generated only": [trace, trace], "third": [trace]})
    drawn = [ax for ax in figure.axes if ax.collections and ax.get_title()]
    assert [ax.get_title() for ax in drawn] == [
        "both (1 prompts)",
        "generated only (2 prompts)",
        "third (1 prompts)",
    ]
    assert {ax.collections[0].get_clim() for ax in drawn} == {(0, 2.0)}
