"""The source distribution and the documentation site are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from build_site import PAGES

ROOT = Path(__file__).parents[2]
KEPT_OUT = {".ci", ".gitignore"}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [Path(line) for line in listed.stdout.splitlines()]


@pytest.mark.slow
def test_the_source_distribution_has_every_tracked_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    files = tracked()
    for file in files:
        target = source / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / file).read_bytes())
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "setuptools>=77"], check=True)
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    built = subprocess.run([python, "-c", build], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (archive,) = tmp_path.glob("gradwire-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    missing = [str(file) for file in files if str(file) not in names and file.parts[0] not in KEPT_OUT]
    assert not missing
    assert not [name for name in names if name.endswith(".pyc")]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    entries = re.findall(r"^ +- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(entries) == sorted(pages | set(PAGES.values()))


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first time, make installs the generator into .venv-site
def test_the_site_is_built_without_a_warning() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    made = subprocess.run(["make", "site"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    reference = (ROOT / "out" / "site" / "reference" / "client.html").read_text()
    assert "forward_backward" in reference and ":class:" not in reference
    assert "Trusted are the operator" in (ROOT / "out" / "site" / "security.html").read_text()
