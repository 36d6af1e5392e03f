"""The example of README for one's own model, from training to the page."""

import re
import shlex
from pathlib import Path

import pytest

from secateur.cli import main
from secateur.runs.folder import load_rows

pytestmark = pytest.mark.system
README = Path(__file__).parents[2] / "README.md"


def test_the_own_model_of_readme_is_trained_and_audited(tmp_path, monkeypatch, capsys):
    section = README.read_text().split("## Bring what you deploy\n")[1].split("\n## ")[0]
    module, program = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^secateur .*", section, re.MULTILINE)]
    (tmp_path / module.partition("\n")[0].removeprefix("# ")).write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {}
    exec(program, names)
    assert (tmp_path / "report.html").is_file() and len(commands) == 3
    for command in commands:
        assert main(command[1:]) == 0, capsys.readouterr().err
    (measured,) = [row.value for row in load_rows(Path("runs/program")) if (row.metric, row.attack) == ("auc", "conf")]
    assert measured == pytest.approx(names["report"].value("auc", "conf"), abs=1e-3)
    assert main(["audit", "own.yaml", "--trust", "--dry-run"]) == 0
