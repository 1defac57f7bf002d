"""docs/analyses.md is how a reader finds an analysis."""

import inspect
import re
from pathlib import Path

import rtk

PAGE = (Path(__file__).parents[2] / "docs" / "analyses.md").read_text(encoding="utf-8")
NOT_ANALYSES = {"Span", "as_traces", "relative_load"}


def test_the_page_names_every_analysis_and_no_other():
    called = re.findall(r"rtk\.(usage|compare)\.(\w+)\(([^)]*)", PAGE)
    assert {name for module, name, _ in called if module == "usage"} == set(rtk.usage.__all__) - NOT_ANALYSES
    for module, name, arguments in called:
        accepted = inspect.signature(getattr(getattr(rtk, module), name)).parameters
        assert {word.strip() for word in re.findall(r"(\w+)=", arguments)} <= set(accepted)
