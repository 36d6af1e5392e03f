"""Run files that come from somebody else: a clear sentence, never gigabytes, a traceback or a hidden field."""

import resource

import pytest
import yaml

from secateur.cli import main
from secateur.config import Audit
from secateur.config.files import read
from secateur.config.messages import load_yaml
from secateur.errors import WrongInput

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "model: mlp\nmodel: vgg11\n",
        "seeds: [" + "[" * 3000 + "]" * 3000 + "]\n",
        "seeds: 2001-13-45\n",
        "seeds: !!int abc\n",
        'seeds: !!int ""\n',
        f"seeds: {'9' * 5000}\n",
        "seeds: !!python/object/apply:os.system [true]\n",
        "{" * 5000,
        "? [a]\n: 1\n",
        "model: " + "x" * 2**21,
    ],
    ids=["laughs", "twice", "deep", "date", "int", "no int", "digits", "object", "flow", "key", "large"],
)
def test_a_hostile_run_file_is_one_sentence(tmp_path, text, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["audit", str(file), "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") <= 3 and len(message) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_a_long_value_is_named_by_its_beginning():
    with pytest.raises(WrongInput) as caught:
        read(Audit, None, {}, ["shadows=" + "x" * 10_000])
    assert len(str(caught.value)) < 400


def test_plain_yaml_reads_as_before():
    text = "model: mlp\nsparsity: [.5, .7]\ntrain: {epochs: 3}\nlimits:\n  auc: 0.6\n"
    assert load_yaml(text) == yaml.safe_load(text)


def test_an_alias_of_reasonable_size_is_read():
    text = "a: &x {epochs: 3}\nb: *x\nc: {<<: *x, patience: 2}\n"
    assert load_yaml(text) == yaml.safe_load(text)


def test_an_alias_to_its_own_value_is_refused():
    with pytest.raises(yaml.YAMLError, match="own value"):
        load_yaml("a: &x [1, *x]\n")
