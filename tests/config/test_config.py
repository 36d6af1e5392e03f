from pathlib import Path

import pytest
import yaml
from pydantic import model_validator

from secateur.config import Audit, Federate, Invert, Prune, Reproduce, Training, choice, dump, flags_of, read
from secateur.config.base import SEEDS
from secateur.errors import WrongInput


def test_flags_are_laid_over_the_file(tmp_path):
    file = tmp_path / "audit.yaml"
    file.write_text("sparsity: [.5, .7]\npruner: snip\ntrain: {epochs: 7}\n")
    config = read(Audit, file, {"sparsity": ".9", "model": None}, ["train.batch_size=32", "shadows=2"])
    assert config.sparsity == [0.9]
    assert [str(p) for p in config.pruner] == ["snip"]
    assert (config.train.epochs, config.train.batch_size, config.shadows) == (7, 32, 2)


def test_what_is_written_reads_back_the_same():
    config = read(Audit, None, {"pruner": "l1-structured:groups=coupled,snip", "seeds": "3", "attack": ["conf"]})
    again = Audit.model_validate(yaml.safe_load(yaml.safe_dump(dump(config))))
    assert again == config
    assert config.seeds == [0, 1, 2]
    assert config.pruner[0].parts[0].make().groups == "coupled"


def test_an_audit_that_decides_trains_three_times():
    """One seed's interval leaves out the training itself: four trainings of one seed gave .555 to .614."""
    assert read(Audit, None, {}).seeds == [0]
    assert read(Audit, None, {}, ["limits.tpr_at_fpr_0.01=.05"]).seeds == [0, 1, 2]
    assert read(Audit, None, {"seeds": "1"}, ["limits.auc=.6"]).seeds == [0]
    assert read(Audit, None, {"predictions": "p.npz"}, ["limits.auc=.6"]).seeds == [0]  # there is one model


def test_recipes_are_the_papers_unless_told_otherwise():
    train, finetune = read(Audit, None, {}).recipes(tabular=False)
    assert (train.epochs, finetune.epochs, train.weight_decay, train.patience) == (100, 50, 5e-4, 5)
    assert read(Audit, None, {}).recipes(tabular=True)[0].epochs == 50
    config = read(Audit, None, {}, ["train.epochs=8", "finetune.learning_rate=0.01", "finetune.patience=null"])
    train, finetune = config.recipes(tabular=True)
    assert (train.epochs, finetune.epochs, finetune.learning_rate, finetune.patience) == (8, 4, 0.01, None)


def test_files_that_cannot_be_read(tmp_path):
    broken, listed = tmp_path / "broken.yaml", tmp_path / "listed.yaml"
    broken.write_text("a: [")
    listed.write_text("- a")
    for file, expected in ((broken, "is not YAML"), (listed, "fields and values"), (tmp_path / "no", "cannot be read")):
        with pytest.raises(WrongInput, match=expected):
            read(Audit, file, {})
    with pytest.raises(WrongInput, match="field=value"):
        read(Audit, None, {}, ["sparsity"])


def test_a_method_can_be_given_as_text_or_as_fields():
    text, fields = choice("defense", "ppb:strength=16"), choice("defense", {"name": "ppb", "strength": 16})
    assert text == fields
    assert text.make().strength == 16
    assert str(read(Prune, None, {}).defense) == "basic"


@pytest.mark.parametrize("flags", [{}, {"pruner": "slimming:l1=1e-5"}, {"defense": "dp-sgd:delta=null"}])
def test_a_written_configuration_means_what_the_first_meant(flags):
    first = read(Audit, None, flags)
    again = Audit.model_validate(yaml.safe_load(yaml.safe_dump(dump(first))))
    assert again == first and dump(again) == dump(first)
    for tabular in (True, False):
        assert again.recipes(tabular) == first.recipes(tabular)
    assert ("train" in again.model_fields_set) == ("train" in first.model_fields_set)


def test_hyper_parameters_become_what_their_annotations_say():
    assert choice("pruner", "slimming:l1=1e-4").make().l1 == 1e-4
    assert choice("defense", "ppb:strength=1e1").make().strength == 10.0
    with pytest.raises(WrongInput, match="generated"):
        choice("attack", "blindmi:generated=abc")
    with pytest.raises(WrongInput, match="not readable"):
        choice("defense", "ppb:strength=[")


def test_a_hyper_parameter_may_be_a_function_of_the_users():
    made = choice("inversion", "ggl:generator=own.module:function:iterations=3")
    assert made.make().generator == "own.module:function" and made.make().iterations == 3
    assert choice("inversion", str(made)) == made
    with pytest.raises(WrongInput, match="name:key=value"):
        choice("inversion", "ggl:fast")


def test_overrides_that_make_no_sense_are_one_sentence():
    for text, expected in (("train.epochs=[", "not readable"), ("model.a=1", "no parts")):
        with pytest.raises(WrongInput, match=expected):
            read(Audit, None, {"model": "mlp"}, [text])


SHARE = "must be in [0, 1)"
FROM_ONE = "must be a whole number, at least 1"


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        (Audit, {"sparsity": "1.0"}, f"sparsity: '1.0' is not allowed; {SHARE}"),
        (Audit, {"sparsity": "-.1"}, f"sparsity: '-.1' is not allowed; {SHARE}"),
        (Audit, {"sparsity": "half"}, f"sparsity: 'half' is not allowed; {SHARE}"),
        (Audit, {"sparsity": "0.5,2"}, f"sparsity: '2' is not allowed; {SHARE}"),
        (Audit, {"pruner": "l1-unstructred"}, "pruner: 'l1-unstructred' is not known; did you mean 'l1-unstructured'?"),
        (Audit, {"attack": "confidence"}, "attack: 'confidence' is not known; did you mean 'conf'?"),
        (Audit, {"defense": "ppp"}, "defense: 'ppp' is not known; did you mean 'ppb'?"),
        (
            Audit,
            {"pruner": "l1-structured:grups=x"},
            "pruner.l1-structured: 'grups' is not known; did you mean 'groups'?",
        ),
        (
            Audit,
            {"pruner": "l1-structured:groups=x"},
            "pruner.l1-structured.groups: 'x' is not allowed; allowed: per-conv, coupled",
        ),
        (Audit, {"pruner": "snip:"}, "pruner: 'snip:' is not readable; write name or name:key=value"),
        (
            Audit,
            {"pruner": {"kind": "snip"}},
            "pruner: {'kind': 'snip'} is not readable; write name, name:key=value or",
        ),
        (Audit, {"sparsities": ".5"}, "sparsities: 'sparsities' is not known; did you mean 'sparsity'?"),
        (Audit, {"shadows": -1}, "shadows: -1 is not allowed; must be a whole number, at least 0"),
        (Audit, {"schema": 2}, "schema: 2 is not allowed; allowed: 1"),
        (Audit, {"train": {"epochs": 0}}, f"train.epochs: 0 is not allowed; {FROM_ONE}"),
        (Audit, {"train": {"momentum": 1}}, f"train.momentum: 1 is not allowed; {SHARE}"),
        (Audit, {"train": {"optimiser": "x"}}, "train.optimiser: 'x' is not allowed; allowed: adam, sgd"),
        (Audit, {"train": {"epoch": 3}}, "train.epoch: 'epoch' is not known; did you mean 'epochs'?"),
        (Audit, {"train": 4}, "train: 4 is not allowed; must be fields and values; allowed: epochs, "),
        (Invert, {"seeds": 0}, f"seeds: 0 is not allowed; {SEEDS}"),
        (Invert, {"seeds": "-1"}, f"seeds: '-1' is not allowed; {SEEDS}"),
        (Invert, {"seeds": "1,-2"}, "seeds: '-2' is not allowed; must be a whole number, at least 0"),
        (Invert, {"device": "tpu"}, "device: 'tpu' is not allowed; allowed: auto, cpu, cuda or cuda:NUMBER"),
        (Invert, {"targets": 0}, f"targets: 0 is not allowed; {FROM_ONE}"),
        (Invert, {"targets": "many"}, f"targets: 'many' is not allowed; {FROM_ONE}"),
        (Invert, {"targets": 1.5}, f"targets: 1.5 is not allowed; {FROM_ONE}"),
        (Invert, {"restarts": 0}, f"restarts: 0 is not allowed; {FROM_ONE}"),
        (Invert, {"learning_rate": 0}, "learning_rate: 0 is not allowed; must be above 0"),
        (Invert, {"labels": "guessed"}, "labels: 'guessed' is not allowed; allowed: inferred, oracle"),
        (Invert, {"images": "perhaps"}, "images: 'perhaps' is not allowed; must be true or false"),
        (Invert, {"weights": 3}, "weights: 3 is not allowed; must be a path"),
        (Invert, {"attack": []}, "attack: [] is not allowed; use at least one value"),
        (Invert, {"attack": "ig:iterations=x"}, "attack.ig.iterations: 'x' is not allowed; must be a whole number"),
        (Invert, {"attack": "ig:distance=x"}, "attack.ig.distance: 'x' is not allowed; allowed: cosine, euclidean"),
        (Invert, {"defense": "dgp:k1=a"}, "defense.dgp.k1: 'a' is not allowed; must be a number"),
        (Invert, {"target": 2}, "target: 'target' is not known; did you mean 'targets'?"),
    ],
)
def test_wrong_input_is_one_sentence_that_names_the_field(kind, fields, sentence):
    with pytest.raises(WrongInput) as refused:
        read(kind, None, fields)
    assert str(refused.value).startswith(sentence) and "\n" not in str(refused.value)


def test_no_field_of_a_run_file_falls_back_to_the_words_of_pydantic():
    """Every field of every run file refuses something in our own words."""
    for kind in (Audit, Invert, Federate):
        for name, field in kind.model_fields.items():
            with pytest.raises(WrongInput) as refused:
                read(kind, None, {field.alias or name: {"no": {"such": ["thing"]}}})
            assert "nput should" not in str(refused.value) and "alid" not in str(refused.value), str(refused.value)


@pytest.mark.parametrize("kind", [Audit, Federate, Invert, Prune, Reproduce, Training])
def test_every_field_is_described(kind):
    for name, field in kind.model_fields.items():
        assert name == "study" or str(field.description).endswith("."), name


def test_flags_come_from_the_schema():
    flags = {flag.name: flag for flag in flags_of(Audit)}
    assert flags["attack"].repeat and not flags["shadows"].repeat and flags["adaptive"].kind is bool
    assert flags["weights"].kind is Path and "finetune" not in flags and "limits" not in flags


@pytest.mark.parametrize("fault", [ValueError, AssertionError])
def test_a_fault_of_a_validator_is_not_told_as_a_wrong_value(fault):
    def fail(self):
        raise fault("of an import")

    class Faulty(Training):
        validated = model_validator(mode="after")(fail)

    with pytest.raises(fault, match="of an import"):
        read(Faulty, None, {})
