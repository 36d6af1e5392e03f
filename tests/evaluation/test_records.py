import csv
import io

import pytest
import torch

from secateur.evaluation.membership import (
    ModelRecords,
    list_most_exposed,
    nonmembers_above,
    ranks,
    worst_groups,
    write_records,
)
from secateur.seeding import derive


def records(**fields):
    common = {
        "model": "snip 0.7, basic",
        "seed": 0,
        "ids": torch.tensor([7, 3, 9, 4]),
        "labels": torch.tensor([0, 1, 0, 1]),
        "is_member": torch.tensor([True, True, False, False]),
        "scores": {"conf": torch.tensor([0.5, 0.9, 0.7, 0.1])},
    }
    return ModelRecords(**(common | fields))


def test_the_file_names_every_row_with_its_score_rank_and_false_positive_rate():
    both = [records(), records(seed=1, scores={"lira": torch.tensor([1.0, 2.0, 3.0, 4.0])})]
    lines = list(csv.DictReader(io.StringIO("".join(write_records(both)))))
    assert len(lines) == 8
    first = lines[0]
    assert (first["id"], first["label"], first["member"], first["conf rank"]) == ("7", "0", "1", "3")
    assert (float(first["conf score"]), float(first["conf nonmembers_above"])) == (0.5, 0.5)
    assert first["lira score"] == "" and lines[4]["conf score"] == "" and lines[7]["lira rank"] == "1"


def test_the_most_exposed_are_members_with_their_ids():
    first, second = list_most_exposed(records(groups=["a", "b", "a", "b"]), "conf", 5)
    assert (first["id"], first["fpr"], first["group"]) == (3, 0.0, "b")
    assert (second["id"], second["fpr"]) == (7, 0.5)


def test_ranks_and_rates_by_hand():
    scores, member = torch.tensor([3.0, 3.0, 2.0, 1.0, 2.0]), torch.tensor([True, False, True, True, False])
    assert ranks(scores).tolist() == [1, 1, 3, 5, 3]
    assert nonmembers_above(scores, member).tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]


def test_the_worst_group_is_found_and_its_interval_holds_for_all_groups():
    rng = derive(0, "groups")
    member = torch.arange(2000) % 2 == 0
    labels = torch.arange(2000) // 2 % 4
    scores = torch.rand(2000, generator=rng)
    scores[member & (labels == 2)] += 0.6  # only one class leaks
    groups = ["old" if i < 1000 else "new" for i in range(2000)]
    part = records(ids=torch.arange(2000), labels=labels, is_member=member, groups=groups, scores={"conf": scores})
    worst, _, note = worst_groups(part, scores)
    by_measure = {exposure.measure: exposure for exposure in worst}
    assert by_measure["auc"].group == "class 2" and by_measure["auc"].groups == 6 and note == ""
    # P[u + .6 > v] of two uniform numbers: 1 - .4 ** 2 / 2
    assert by_measure["auc"].estimate.value == pytest.approx(0.92, abs=0.03)
    assert "tpr_at_fpr_0.01" in by_measure and by_measure["auc"].estimate.low > 0.85


def test_small_groups_are_left_out_and_counted():
    part = records()
    worst, _, note = worst_groups(part, part.scores["conf"])
    assert worst == [] and note == "2 groups have fewer than 20 members or non-members"
