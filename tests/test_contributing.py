"""The recipes of CONTRIBUTING.md, carried out as they are written there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml
from command_line import tune
from cpu_machine import GPP

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
# A step of a recipe: the first file that it names, and the block that follows.
STEP = re.compile(
    r"^\d\. (?P<words>(?:(?!\n\d\. |```).)*?)\n\n   ```\w+\n(?P<text>.*?)^   ```", re.M | re.S
)
FILE = re.compile(r"`([\w./]+\.(?:yaml|py|j2))`")


def written(repository: Path, heading: str, folder: Path) -> None:
    """Write the files of a recipe into a folder."""
    text = (repository / "CONTRIBUTING.md").read_text()
    recipe = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for step in STEP.finditer(recipe):
        if name := FILE.search(step["words"]):
            path = folder / name[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(step["text"]))


RECIPES = {
    "Add a template": ("plain", {"batch": 192, "in_features": 64, "out_features": 96}),
    "Add an operator": ("squared_relu", {"rows": 256, "columns": 128}),
}


@pytest.mark.parametrize("heading", RECIPES)
@pytest.mark.usefixtures("few")
def test_a_recipe_ends_in_a_verified_file(heading, repository, tmp_path):
    """With its config as it is but for sizes, which are small."""
    written(repository, heading, tmp_path)
    name, sizes = RECIPES[heading]
    config = tmp_path / f"{name}.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["problem"]["sizes"] = sizes
    config.write_text(yaml.safe_dump(settings))
    said = tune("--config", config.name, "--effort", "quick", cwd=tmp_path)
    assert said.code == 0, said.out + said.err
    assert [*tmp_path.glob("runs/*/export/model_new.py")], said.out
