import dataclasses

import pytest

from rtk import usage
from rtk.errors import TraceError


def test_bad_input_is_named(trace):
    with pytest.raises(TraceError, match="no traces"):
        usage.counts([])
    with pytest.raises(TraceError, match=r"holds one in \.trace"):
        usage.counts([trace.token_ids])
    with pytest.raises(TraceError, match="span is 'answer'"):
        usage.counts(trace, span="answer")
    other = dataclasses.replace(trace, layout=dataclasses.replace(trace.layout, num_experts=8))
    with pytest.raises(TraceError, match="different models"):
        usage.counts([trace, other])
    physical = trace.routed_experts.copy()
    physical[2, 3, 1] = 9
    with pytest.raises(TraceError, match=r"layer 3 .* 1\.\.9 for 4 experts"):
        usage.counts(dataclasses.replace(trace, routed_experts=physical))


def test_layers_and_slots_of_another_model_are_named(trace):
    with pytest.raises(TraceError, match=r"layers \[2\]: the model's MoE layers are \[1, 3\]"):
        usage.vocabulary_specialization(trace, layers=[2], min_count=1)
    with pytest.raises(TraceError, match=r"layers \[\]"):
        usage.domain_specialization({"all": trace}, layers=[])
    with pytest.raises(TraceError, match=r"top_k is 3; the model's routers pick 2"):
        usage.vocabulary_specialization(trace, top_k=3)
    with pytest.raises(TraceError, match="top_k is 0"):
        usage.domain_specialization({"all": trace}, top_k=0)
