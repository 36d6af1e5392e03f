"""A picture of a sub-model client comes back to a server that knows of its sub-model and of Adam."""

import pytest

from secateur.cli import main
from secateur.runs.folder import load_rows

pytestmark = pytest.mark.system


def test_a_digit_comes_back_from_three_quarters_of_a_network(tmp_path):
    flags = ["--submodels", "mapp-fl", "--model", "lenet-zhu", "--data", "digits", "--clients", "4", "--rounds", "1"]
    flags += ["--local-steps", "1", "--batch-size", "1", "--large-clients", "1", "--client-widths", ".75"]
    flags += ["--attack", "ig:tv=0.01:unrolls=false,ig:tv=0.01", "--iterations", "600", "--attack-clients", "[1]"]
    assert main(["federate", *flags, "--no-images", "--out", str(tmp_path)]) == 0
    rows = [row for row in load_rows(tmp_path) if row.extra.get("target", 0) is None]
    psnr = [row for row in rows if row.metric == "psnr"]
    plain, aware = (
        {row.extra["client"]: row.value for row in psnr if ("unrolls=false" not in row.attack) == knows}
        for knows in (False, True)
    )
    assert set(plain) == set(aware) == {1} and {row.extra["rate"] for row in rows} == {0.75}
    assert max(plain.values()) < 12 < 15 < min(aware.values())
