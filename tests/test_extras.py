"""What is missing is said by name; run in the bare core too, where it is missing indeed."""

import sys

import numpy as np
import pytest

import rtk
from rtk.errors import MissingPackage


@pytest.fixture
def without(monkeypatch):
    def hide(*packages):
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)

    return hide


def test_widgets(without, monkeypatch):
    without("ipywidgets")
    for name in [name for name in sys.modules if name.startswith("rtk.widgets")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(vars(rtk), "widgets", raising=False)  # getattr would import it
    with pytest.raises(
        MissingPackage, match=r"rtk.widgets needs ipywidgets: pip install 'moe-rtk\[notebook\]'"
    ):
        rtk.widgets.__name__  # noqa: B018 - reaching for it imports it


@pytest.mark.parametrize(
    ("call", "what", "package"),
    [
        (lambda trace: rtk.usage.table(trace), "rtk.usage.table", "pandas"),
        (lambda trace: rtk.usage.heatmap(trace), "rtk.usage.heatmap", "seaborn"),
        (lambda trace: rtk.compare.agreement(trace, trace), "rtk.compare.agreement", "pandas"),
        (lambda trace: rtk.allow_nested_loops(), "rtk.allow_nested_loops", "nest_asyncio2"),
    ],
)
def test_calls(without, trace, call, what, package):
    without(package)
    with pytest.raises(MissingPackage, match=rf"^{what} needs {package}: pip install 'moe-rtk\[notebook\]'$"):
        call(trace)


def test_counts_need_no_tables(without, trace):
    without("pandas", "seaborn")
    assert np.asarray(rtk.usage.counts(trace)).sum() == 4 * 2 * 2
