"""Links in the project's documents lead somewhere, and files that they name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("data/*.md")])


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue  # no test asks the network
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named(page):
    """`tests/...`, `rtk/...` and the like in code quotes."""
    named = re.findall(
        r"`((?:rtk|tests|docs|benchmarks|data|notebooks)/[\w./-]+)`", page.read_text(encoding="utf-8")
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, f"{page.name} names {missing}"


def test_the_architecture_names_files_that_exist():
    """Its tables name files relative to rtk/."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_/]+(?:\.py|/))`", page)
    assert len(named) > 30
    rooms = [
        ROOT,
        ROOT / "rtk",
        *(
            ROOT / "rtk" / room
            for room in ("client", "client/servers", "session", "trace", "usage", "replay", "doctor")
        ),
    ]
    rooms += [ROOT / "rtk" / "replay" / room for room in ("layouts", "checks", "faults", "live")]
    missing = [name for name in named if not any((room / name).exists() for room in rooms)]
    assert not missing
