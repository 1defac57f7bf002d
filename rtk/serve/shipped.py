"""Where the tiny model and the prompts that come with rtk are."""

from __future__ import annotations

import json
from pathlib import Path

from rtk.errors import RtkError

_PACKAGE = Path(__file__).parents[1]


def find(name: str) -> Path:
    """A file or folder of the project's data: inside an installed wheel, else in the checkout's data/.

    Raises:
        RtkError: it is in neither place.
    """
    places = (_PACKAGE / "_data" / name, _PACKAGE.parent / "data" / name)
    for place in places:
        if place.exists():
            return place
    raise RtkError(
        f"{name} does not come with this installation of rtk (looked for {' and '.join(map(str, places))}): "
        "install from a full checkout or from a wheel"
    )


def prompts() -> dict[str, list[str]]:
    """Prompts of each domain that the tiny model was trained on."""
    loaded: dict[str, list[str]] = json.loads(find("prompts.json").read_text(encoding="utf-8"))
    return loaded
