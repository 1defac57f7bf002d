import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import numpy as np
import pytest

from rtk import ModelLayout
from rtk.replay import Agreement, Finding, Hypothesis, ReplayReport, Shard
from rtk.replay.checks.agreement_picture import _STEPS

LAYOUT = ModelLayout(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2)
GUESS = Hypothesis(
    "off by one", "each row has the routes of the token 1 later", "move the gap", 0.1, 0.98, True
)
WRONG = Hypothesis("shifted layers", "layer 2 has the routes of layer 3", "use numbers", 0.1, 0.2, False)


@pytest.fixture
def agreement() -> Agreement:
    """Three routers, eight rows of which the last two are padding; layer 3 is wrong in rows 4 and 5."""
    same = np.ones((3, 8), bool)
    same[1, 4:6] = False
    same[:, 6:] = False
    return Agreement("the <record>", (2, 3, 4), same, np.arange(8) < 6)


@pytest.fixture
def failed(agreement) -> ReplayReport:
    findings = (
        Finding("layer numbers", True, "routers of layers [2, 3, 4]"),
        Finding("agreement with the record", False, "88.9% of routers agree", 3, 4),
    )
    return ReplayReport(Shard(LAYOUT), findings, agreement, (GUESS, WRONG))


def test_agreement_leaves_padding_out(agreement):
    assert agreement.share == pytest.approx(16 / 18)
    assert agreement.by_layer == pytest.approx((1, 4 / 6, 1))
    edges, shares = agreement.by_span(4)
    assert edges.tolist() == [0, 2, 4, 6, 8]
    assert shares[1].tolist()[:3] == [1, 1, 0]
    assert np.isnan(shares[:, 3]).all()
    assert len(agreement.by_span(100)[0]) == 9  # a span holds a row at least


def test_it_says_where_what_and_what_to_do(failed):
    assert failed.fault == "off by one"
    assert failed.first_bad == (3, 4)
    assert failed.diagnosis == (
        "pipeline stage 0 of 1: NOT lined up, first at layer 3, row 4: off by one: each row has the routes of the "
        "token 1 later; move the gap"
    )
    table = str(failed)
    assert "why   off by one" in table
    assert "not   shifted layers" in table
    assert table.endswith("do    move the gap")


def test_unknown_is_said_as_unknown(failed, agreement):
    report = ReplayReport(failed.shard, failed.findings, agreement, (WRONG,))
    assert report.explanation is None
    assert report.fault == "unknown"
    assert "the cause is unknown: 88.9% of routers agree" in report.diagnosis


def test_a_finding_that_stands_alone_names_the_fault(failed, agreement):
    zeros = Finding("not all zero", False, "all 0: not captured", 2, 0, "not captured")
    report = ReplayReport(failed.shard, (zeros, *failed.findings), agreement, (GUESS,))
    assert report.fault == "not captured"
    assert report.first_bad == (2, 0)
    assert "not captured: all 0" in report.diagnosis


def test_json_round_trip(failed):
    told = json.loads(failed.to_json(indent=2))
    assert told == failed.to_dict()
    assert told["fault"] == "off by one"
    assert told["first_bad"] == {"layer_number": 3, "row": 4}
    assert told["findings"][1] == {
        "check": "agreement with the record", "passed": False, "evidence": "88.9% of routers agree",
        "layer_number": 3, "row": 4, "fault": None,
    }  # fmt: skip
    assert told["agreement"]["by_layer"] == [1.0, 0.666667, 1.0]
    assert told["agreement"]["by_span"][0] == [1.0] * 6 + [None] * 2  # JSON has no NaN
    assert told["hypotheses"][0]["after"] == 0.98


def test_a_lined_up_report():
    report = ReplayReport(Shard(LAYOUT), (Finding("layer numbers", True, "fine"),))
    assert report.ok
    assert report.fault is report.first_bad is report.agreement is None
    assert report.diagnosis == "pipeline stage 0 of 1: lined up"
    assert "<svg" not in report._repr_html_()


def test_the_heat_map_marks_the_first_bad_cell(failed):
    page = failed._repr_html_()
    picture = ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.S).group())
    name = "{http://www.w3.org/2000/svg}"
    assert "the <record>" in picture.get("aria-label")  # escaped, or the XML would not parse
    marks = [g for g in picture.iter(name + "g") if g.get("class") == "first-bad"]
    assert len(marks) == 1
    assert marks[0].find(name + "title").text == "first bad cell: layer 3, row 4"
    cells = {
        rect.find(name + "title").text: rect.get("fill")
        for rect in picture.iter(name + "rect")
        if rect.find(name + "title") is not None
    }
    assert cells == {
        "layer 2, rows 0..5: 100.0%": _STEPS[-1],
        "layer 3, rows 0..3: 100.0%": _STEPS[-1],
        "layer 3, rows 4..5: 0.0%": _STEPS[0],
        "layer 4, rows 0..5: 100.0%": _STEPS[-1],
    }
    outline, bad = (
        marks[0].find(name + "rect"),
        next(
            r
            for r in picture.iter(name + "rect")
            if r.get("fill") == _STEPS[0] and r.find(name + "title") is not None
        ),
    )
    assert float(outline.get("x")) == pytest.approx(float(bad.get("x")) - 2, abs=0.11)


def test_colours_differ_in_lightness_alone():
    """Steps must rise in relative luminance (WCAG 2), so that they read without colour vision and in grey."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    steps = [luminance(colour) for colour in _STEPS]
    assert all(b - a > 0.005 for a, b in pairwise(steps))
    assert steps[-1] - steps[0] > 0.6
