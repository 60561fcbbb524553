"""CONTRIBUTING.md is true: what it names exists, and a loss added as it says is tested by the command it gives."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PARTS = ("client", "server", "losses", "proto")
NAME = "steady_nll"

LOSS = f'''
"""The mean negative log-probability, weighted."""
from gradwire_losses.batch import Batch, Scores
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK
from gradwire_losses.outputs import LossOutput, Mean, Term
from gradwire_losses.registry import LossConfig, register_loss
from pydantic import Field


class Config(LossConfig):
    weight: float = Field(2.0, ge=0, description="of the whole loss")


@register_loss(
    "{NAME}",
    config=Config,
    fields=(INPUT_IDS, LOSS_MASK),
    metrics={{"mean_logprob": "mean log-probability, in nats"}},
    reference="none",
    formula="-w/T sum log p",
    streams=True,
)
def loss(batch: Batch, scores: Scores, config: Config) -> LossOutput:
    """Mean negative log-probability of the scored tokens."""
    lp = scores.logprobs
    return LossOutput({{"nll": Term(-config.weight * lp.sum(), len(lp), "tokens")}}, {{"mean_logprob": Mean.of(lp)}})
'''

CASES = f'''
import pytest
from support.loss_properties import PROPERTIES
from support.losses import Case, row_columns


def reference(examples, config):
    tokens = [value for [row] in examples for value in row.score_logprobs]
    mean = sum(tokens) / len(tokens)
    return -config.weight * mean, {{"mean_logprob": mean}}


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", [Case("{NAME}", row_columns, {{}}, reference)], ids=lambda case: case.id)
def test_property(case, check, rng):
    check(case, rng)
'''


def test_the_page_names_files_that_exist() -> None:
    named = {each for each in re.findall(r"`([\w./]+/[\w./]*)`", PAGE) if not each.startswith("out/")}
    bases = (ROOT, ROOT / "server/gradwire_server", ROOT / "losses/gradwire_losses")
    assert len(named) > 10
    assert [each for each in sorted(named) if not any((base / each).exists() for base in bases)] == []


@pytest.mark.slow
def test_a_loss_that_is_added_as_the_page_says_is_tested_by_its_command(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / f"losses/gradwire_losses/{NAME}.py").write_text(LOSS)
    (tmp_path / f"tests/losses/test_{NAME}.py").write_text(CASES)
    listing = tmp_path / "tests/losses/test_reduction.py"
    listing.write_text(listing.read_text().replace("OF_SEQUENCES = {", f'OF_SEQUENCES = {{"{NAME}", '))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(tmp_path / part) for part in PARTS)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("tools/make_loss_reference.py")
    assert any(NAME in page.read_text() for page in (tmp_path / "docs/losses").glob("*.md"))
    (command,) = re.findall(r"^\$ \.venv/bin/pytest (.*) -k NAME$", PAGE, re.MULTILINE)
    passed = re.search(r"(\d+) passed", run("-m", "pytest", "-n0", *command.split(), "-k", NAME))
    assert passed is not None and int(passed[1]) > 5
    run("-m", "pytest", "-n0", "tests/losses/test_reduction.py", "tests/losses/test_registry.py")
