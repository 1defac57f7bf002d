import dataclasses

import numpy as np
import pytest

from rtk import compare
from rtk.errors import TraceError


def test_agreement_by_hand(trace):
    routes = trace.routed_experts.copy()
    routes[0, 1] = [1, 0]  # the same experts, in the other order
    routes[1, 1] = [1, 2]  # one of two shared
    routes[3, 3] = [0, 3]  # none shared
    table = compare.agreement(trace, dataclasses.replace(trace, routed_experts=routes))
    assert table.index.tolist() == [1, 3]
    assert table["tokens"].tolist() == [4, 4]
    assert table["same_experts"].tolist() == [0.75, 0.75]
    assert table["overlap"].tolist() == [3.5 / 4, 0.75]
    assert table["same_order"].tolist() == [0.5, 0.75]


def test_a_row_more_is_left_out(trace):
    whole = np.concatenate([trace.routed_experts, trace.routed_experts[:1]])
    table = compare.agreement(trace, dataclasses.replace(trace, routed_experts=whole))
    assert table["tokens"].tolist() == [4, 4]
    assert (table["same_order"] == 1).all()


def test_several_traces_are_pooled(trace):
    other = dataclasses.replace(trace, routed_experts=(trace.routed_experts + 1) % 4)
    table = compare.agreement([trace, trace], [trace, other])
    assert table["tokens"].tolist() == [8, 8]
    assert (table["same_order"] == 0.5).all()


def test_what_cannot_be_compared_is_refused(trace):
    with pytest.raises(TraceError, match="2 traces cannot be compared with 1"):
        compare.agreement([trace, trace], trace)
    with pytest.raises(TraceError, match="pair 0: the traces hold different tokens"):
        compare.agreement(trace, dataclasses.replace(trace, token_ids=trace.token_ids + 1))
    other = dataclasses.replace(trace, layout=dataclasses.replace(trace.layout, num_experts=8))
    with pytest.raises(TraceError, match="different models"):
        compare.agreement(trace, other)
