"""What the documents tell a newcomer to type works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.user_stack import Stack

ROOT = Path(__file__).parents[3]
DOCUMENTS = ["README.md", "sdk/README.md", "docs/quickstart.md"]


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_examples_run(document: str, stack: Stack) -> None:
    found = blocks(document, "python")
    assert found
    for code in found:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], env=stack.env, capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout


def test_the_three_commands_of_the_readme_run(stack: Stack) -> None:
    commands = [line for block in blocks("README.md", "") for line in block.splitlines() if "sojourn exec" in line]
    assert len(commands) == 3
    for command in commands:
        here = command.replace(".venv/bin/sojourn", f"{sys.executable} -m sojourn")
        done = subprocess.run(
            ["bash", "-c", here], env=stack.env, cwd=ROOT, capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout


def test_the_make_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join((ROOT / document).read_text() for document in [*DOCUMENTS, "CONTRIBUTING.md", "CHANGELOG.md"])
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE))
    assert {"up", "test", "demo"} <= named <= targets


def test_links_in_documents_lead_somewhere() -> None:
    for document in [*DOCUMENTS, "CONTRIBUTING.md", "docs/architecture.md", "docs/quickstart.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text()):
            assert ((ROOT / document).parent / target).exists(), f"{document}: {target}"
