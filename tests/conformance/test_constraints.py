"""constraints.txt pins everything that an extra installs, and a release is built by tools with known hashes."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from secateur.catalogue import PAPERS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"": PROJECT["dependencies"]} | PROJECT["optional-dependencies"]
PYTHONS = ("3.11", "3.12", "3.13")
LOCKED = ROOT / ".github" / "release-tools.txt"


def read_pins(path):
    lines = re.findall(r"^([\w.-]+)==([^\s\\]+)", path.read_text(), re.M)
    pins = {canonicalize_name(name): version for name, version in lines}
    assert len(pins) == len(lines), "a package is pinned twice"
    return pins


PINS = read_pins(ROOT / "constraints.txt")


def applies(requirement, extras):
    """Whether CPython on Linux needs it, on any machine."""
    marker = requirement.marker
    here = [{"python_version": v, "python_full_version": f"{v}.0", "extra": e} for v in PYTHONS for e in ("", *extras)]
    system = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    return marker is None or any(marker.evaluate(system | one) for one in here)


def test_every_requirement_of_an_extra_is_pinned_within_its_range():
    for extra, texts in EXTRAS.items():
        for requirement in map(Requirement, texts):
            version = PINS.get(canonicalize_name(requirement.name))
            assert version, f"{requirement} of the extra {extra!r} is not in constraints.txt"
            assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_what_these_need_is_pinned_too():
    """As far as it is installed here: metadata of other packages is not at hand."""
    queue = [(Requirement(text), "pyproject.toml") for texts in EXTRAS.values() for text in texts]
    seen, open_ones = set(), []
    while queue:
        requirement, source = queue.pop()
        name, extras = canonicalize_name(requirement.name), tuple(sorted(requirement.extras))
        if name not in PINS:
            open_ones.append(f"{name} (of {source})")
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            texts = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        queue += [(needed, name) for needed in map(Requirement, texts) if applies(needed, extras)]
    assert not open_ones and len(seen) > 20


def test_the_tools_of_a_release_have_hashes_and_the_versions_of_the_tests():
    tools = read_pins(LOCKED)
    for entry in re.split(r"\n(?=\w)", LOCKED.read_text().strip()):
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), entry
    wanted = [line for line in LOCKED.with_suffix(".in").read_text().splitlines() if line and line[0] != "#"]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(tools[canonicalize_name(requirement.name)])
    other = {name: version for name, version in tools.items() if PINS.get(name, version) != version}
    assert not other


@pytest.mark.parametrize("word", ["pip install", "python -m build"])
def test_a_release_installs_nothing_by_name_alone(word):
    workflow = (LOCKED.parent / "workflows" / "release.yml").read_text()
    lines = [line.strip() for line in workflow.splitlines() if word in line]
    assert lines
    for line in lines:
        assert "--require-hashes" in line or "-c constraints.txt" in line or "--no-isolation" in line, line


def test_the_image_copies_what_is_there_and_installs_known_extras_with_the_pins():
    text = (ROOT / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert copied and set(copied) == set(allowed) and all((ROOT / name).exists() for name in copied)
    assert set(re.search(r"^ARG EXTRAS=(\S+)$", text, re.M)[1].split(",")) <= set(EXTRAS)
    assert "-c /src/constraints.txt" in text and "USER 1000" in text


def test_the_citation_names_this_version_and_the_four_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] and citation["authors"]
    assert [paper["notes"] for paper in citation["references"]] == list(PAPERS)
