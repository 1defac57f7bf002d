"""Build the four-domain text corpus that the tiny model is trained on.

    python data/training/corpus.py OUT_DIR

Every domain becomes one file, OUT_DIR/<domain>.txt, of documents separated by the end-of-text
mark. The sources are named, with their licences, in data/README.md:

- english     Jane Austen's six novels (public domain), from Debian's r-cran-janeaustenr
- french      Le cahier de l'administrateur Debian (CC BY-SA 3.0), from Debian's debian-handbook
- python      the running interpreter's standard library (PSF licence)
- arithmetic  generated here from a seed

The two Debian packages are downloaded with `apt-get download` and unpacked, never installed.
"""

from __future__ import annotations

import argparse
import html
import random
import re
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path

import rdata  # type: ignore[import-untyped]

END_OF_TEXT = "<|endoftext|>"
SEED = 2510
ARITHMETIC_DOCUMENTS = 24_000
PYTHON_CHARACTERS = 6_000_000


def unpack(package: str, into: Path) -> Path:
    subprocess.run(["apt-get", "download", package], cwd=into, check=True)
    (archive,) = into.glob(f"{package}_*.deb")
    subprocess.run(["dpkg", "-x", str(archive), str(into / package)], check=True)
    return into / package


def english(scratch: Path) -> list[str]:
    """The novels, cut at their chapter headings."""
    folder = unpack("r-cran-janeaustenr", scratch) / "usr/lib/R/site-library/janeaustenr/data"
    # R keeps lazily loaded data as one file of compressed objects and an index of
    # (offset, length) pairs; each object starts with its own 4-byte length.
    index = rdata.conversion.convert(rdata.parser.parse_data((folder / "Rdata.rdx").read_bytes()))
    blob = (folder / "Rdata.rdb").read_bytes()
    chapters = []
    for offset, length in index["variables"].values():
        serialised = zlib.decompress(blob[int(offset) + 4 : int(offset) + int(length)])
        value = rdata.conversion.convert(rdata.parser.parse_data(serialised))
        lines = [str(line) for line in value]
        # The printed line breaks carry no meaning: keep the paragraphs only.
        novel = re.sub(r"(?<!\n)\n(?!\n)", " ", "\n".join(lines))
        novel = re.sub(r"\n{2,}", "\n\n", novel)
        chapters += re.split(r"\n\n(?=(?:CHAPTER|Chapter) )", novel)
    return chapters


def french(scratch: Path) -> list[str]:
    """The handbook's paragraphs, one document a page, without its code listings and menus."""
    folder = unpack("debian-handbook", scratch) / "usr/share/doc/debian-handbook/html/fr-FR"
    pages = []
    for page in sorted(folder.glob("*.html")):
        paragraphs = re.findall(r'<(?:p|div class="para")[^>]*>(.*?)</(?:p|div)>', page.read_text(), re.S)
        texts = (html.unescape(re.sub(r"<[^>]+>", "", p)) for p in paragraphs)
        flat = (re.sub(r"\s+", " ", t).strip() for t in texts)
        pages.append("\n\n".join(t for t in flat if len(t) > 60))
    return [p for p in pages if len(p) > 500]


def python() -> list[str]:
    """Standard library modules in a seeded order, up to PYTHON_CHARACTERS; no tests, no tables."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        file
        for file in library.rglob("*.py")
        if not {"test", "tests", "site-packages", "idlelib", "encodings", "pydoc_data"} & set(file.parts)
    )
    random.Random(SEED).shuffle(files)
    sources: list[str] = []
    size = 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        if size > PYTHON_CHARACTERS:
            break
        if 1_000 < len(text) < 200_000:
            sources.append(text)
            size += len(text)
    return sources


def arithmetic() -> list[str]:
    """Short worksheets: sums, differences, products and exact quotients of small numbers."""
    rng = random.Random(SEED)

    def line() -> str:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        small, digit = rng.randint(1, 12), rng.randint(1, 12)
        return rng.choice(
            [
                f"{a} + {b} = {a + b}",
                f"{a + b} - {b} = {a}",
                f"{small} * {digit} = {small * digit}",
                f"{small * digit} / {digit} = {small}",
            ]
        )

    return ["\n".join(line() for _ in range(12)) for _ in range(ARITHMETIC_DOCUMENTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        domains = {
            "english": english(Path(scratch)),
            "french": french(Path(scratch)),
            "python": python(),
            "arithmetic": arithmetic(),
        }
    for name, documents in domains.items():
        random.Random(SEED).shuffle(documents)
        text = END_OF_TEXT.join(documents)
        (out / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name:12} {len(documents):6,} documents {len(text):10,} characters")


if __name__ == "__main__":
    main()
