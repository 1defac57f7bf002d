import dataclasses
import html.parser

from rtk import report
from rtk.replay import Shard, check


class Page(html.parser.HTMLParser):
    """Collects what a browser would fetch, and the text."""

    def __init__(self):
        super().__init__()
        self.fetched, self.text = [], ""

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_and_fetches_nothing(trace):
    groups = {"prose & verse": [trace], "code": [dataclasses.replace(trace, source={"model": "m"})]}
    reports = [check(trace, Shard(trace.layout, 2, rank)) for rank in range(2)]
    page = Page()
    source = report.render(groups, reports, title="Two <groups>")
    page.feed(source)
    assert page.fetched
    assert all(address.startswith("data:image/png;base64,") for address in page.fetched)
    assert "url(" not in source
    for words in (
        "Two <groups>",
        "prose & verse",
        "hand-made",
        "pipeline stage 1 of 2: lined up",
        "The cat <b> sat",
    ):
        assert words in page.text, words
    # By hand, layer 1 of both traces together: loads 8, 6, 0, 2.
    assert "16" in page.text
