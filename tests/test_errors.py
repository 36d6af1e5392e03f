"""Optional parts: whoever asks for one that is missing learns which extra brings it (test_context.py: and when)."""

import pickle
import re
import tomllib
from pathlib import Path

import pytest

from secateur.errors import NotFinite, WrongInput, check_whole, install_command, require, unknown


@pytest.mark.parametrize("wrong", [WrongInput("sparsity", "is 2"), NotFinite()])
def test_they_come_back_whole_from_another_process(wrong):
    back = pickle.loads(pickle.dumps(wrong))
    assert (type(back), str(back), back.field) == (type(wrong), str(wrong), wrong.field)


def test_what_is_there_is_not_refused():
    require("torch", "core")


def test_the_extras_that_are_named_exist(hide):
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    for package, extra in (("ray", "ray"), ("opacus", "dp")):
        assert any(line.startswith(package) for line in project["project"]["optional-dependencies"][extra])
        hide(package)
        with pytest.raises(WrongInput, match=re.escape(f"'.[{extra}]'")):
            require(package, extra)


def test_a_clone_installs_its_own_files_and_a_wheel_asks_the_index(tmp_path):
    package = tmp_path / "src" / "secateur"
    package.mkdir(parents=True)
    assert install_command("dp", package) == "pip install 'secateur-audit[dp]'"
    (tmp_path / "pyproject.toml").touch()
    assert install_command("dp", package) == "pip install -c constraints.txt -e '.[dp]'"
    assert install_command("dp", tmp_path / "site-packages" / "secateur") == "pip install 'secateur-audit[dp]'"


@pytest.mark.parametrize("value", [True, 1.0, 0])
def test_a_whole_number_is_no_truth_value_and_no_fraction(value):
    check_whole("rounds", 1)
    with pytest.raises(WrongInput, match=f"rounds: {value} is not allowed; must be a whole number, at least 1"):
        check_whole("rounds", value)


@pytest.mark.parametrize("name", ["x" * 5_000, "x y " * 1_250, "\x1b[2J" * 1_000])
def test_a_name_of_5000_characters_is_cut(name):
    for error in (
        WrongInput(name, "is no field"),
        unknown("attack", name, ["conf"]),
        WrongInput("data", f"{name}: no"),
    ):
        assert len(str(error)) < 4_100 and "more characters]" in str(error) and str(error).isprintable()
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_words_of_a_path_and_long_lists_stay_whole():
    names = [f"method-{i}" for i in range(200)]
    path = "/" + "a/" * 200
    assert str(WrongInput("data", f"{path} is missing")) == f"data: {path} is missing"
    assert ", ".join(sorted(names)) in str(unknown("attack", "x", names))
