"""The two lists of packages agree, and a plain import stays light."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
# The same project under the name that conda-forge gives it.
CONDA_NAMES = {"lazy_loader": "lazy-loader", "matplotlib-base": "matplotlib", "pytorch-cpu": "torch"}


def split(requirement: str) -> tuple[str, str]:
    match = re.match(r"([A-Za-z0-9._-]+)(.*)", requirement)
    assert match, requirement
    name = match[1].lower()
    return CONDA_NAMES.get(name, name), match[2]


def test_environment_yml_and_pyproject_name_the_same_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = dict(map(split, project["dependencies"] + extras["embedded"] + extras["notebook"]))
    wanted["python"] = project["requires-python"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip,) = [entry["pip"] for entry in environment if isinstance(entry, dict)]
    assert pip[-1] == "-e .[embedded,notebook]"
    listed = dict(split(entry) for entry in environment + pip[:-1] if isinstance(entry, str))
    del listed["pip"]
    assert listed == wanted


def test_the_pinned_torch_satisfies_the_extras():
    packaging = pytest.importorskip("packaging.requirements", reason="packaging is not installed")
    (pin,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = [packaging.Requirement(text) for texts in extras.values() for text in texts]
    torch = [requirement for requirement in requirements if requirement.name == "torch"]
    assert torch
    assert all(pin in requirement.specifier for requirement in torch)


def test_importing_rtk_brings_nothing_heavy_along():
    heavy = [
        "torch",
        "vllm",
        "transformers",
        "matplotlib",
        "pandas",
        "seaborn",
        "IPython",
        "megatron",
        "aiohttp",
    ]
    code = f"import sys, rtk; print(sorted(set({heavy}) & set(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert output.stdout.strip() == "[]"


def test_every_public_name_has_a_docstring():
    import rtk

    for name in rtk.__all__:
        assert getattr(rtk, name).__doc__, name
