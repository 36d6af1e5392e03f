"""Archives of rows: what goes in comes out, what a stranger wrote is refused, and runs become one file."""

import json
import lzma
import os
import zlib
from dataclasses import replace

import pytest

from secateur.cli import main
from secateur.errors import WrongInput
from secateur.runs import archive
from secateur.runs.archive import gather_runs, read_archive, write_archive
from secateur.runs.folder import COMMAND, open_run
from secateur.runs.rows import Row

LABELS = {"model": "mlp", "dataset": "digits", "pruner": "none", "sparsity": 0.0, "defense": "basic"}
FIGURE = LABELS | {"kind": "classes", "quantity": "confidence", "seed": 0, "members": [0.9], "nonmembers": [0.7]}


def rows_of(seed):
    values = {"test_accuracy": 0.9, "train_accuracy": 1.0, "confidence_gap": 0.2, "sensitivity_gap_size": 0.1}
    return [Row(**LABELS, seed=seed, metric=name, value=x, low=x - 0.01, high=x + 0.01) for name, x in values.items()]


@pytest.fixture
def runs(tmp_path):
    """Two seeds of a study, run on a machine of its own each."""
    folders = []
    for seed in (0, 1):
        folder = tmp_path / f"run-{seed}"
        token = COMMAND.set(
            "secateur reproduce samia-fig6 --scale small --data-folder /home/me/data --set net=/home/me/net.pt "
            f"--out runs/{seed}"
        )
        with open_run(folder, "audit", {"model": "mlp"}, seeds=[seed]) as run:
            run.add(rows_of(seed))
            run.show([FIGURE | {"seed": seed}, {"kind": "roc", "fpr": [0, 1], "tpr": [0, 1], "seed": seed}])
        COMMAND.reset(token)
        folders.append(folder)
    return folders


def test_rows_provenance_and_some_figures_come_back(tmp_path):
    labels = {"model": "m", "dataset": "d", "metric": "auc", "note": "of few", "extra": {"round": 3, "view": "sum"}}
    rows = [Row(**labels, seed=seed, value=value) for seed, value in ((0, 0.5), (1, None), (1, float("inf")))]
    write_archive(tmp_path / "a.jsonl.xz", rows, {"commit": "abc"}, [FIGURE, {"kind": "picture", "png": "..."}])
    assert read_archive(tmp_path / "a.jsonl.xz") == ({"commit": "abc"}, rows, [FIGURE])


def test_runs_become_one_archive_without_the_users_paths(runs):
    gathered = gather_runs(runs, commit="abc1234")
    assert len(gathered.rows) == 8 and len(gathered.figures) == 4
    assert (gathered.studies, gathered.scale, gathered.provenance["seeds"]) == (["samia-fig6"], "small", [0, 1])
    assert gathered.provenance["commit"] == "abc1234" and "/home/me" not in json.dumps(gathered.provenance)
    assert "--data-folder PATH --set net=net.pt --out PATH" in gathered.provenance["command"]


def test_archives_are_joined_as_runs_are(runs, tmp_path):
    parts = [tmp_path / f"{number}.jsonl.xz" for number in (0, 1)]
    for run, part, commit in zip(runs, parts, ("abc1234", "def5678"), strict=True):
        alone = gather_runs([run], commit=commit)
        write_archive(part, alone.rows, alone.provenance, alone.figures)
    joined = gather_runs(parts)
    assert joined.rows == gather_runs(runs, commit="abc1234").rows and len(joined.figures) == 2
    assert joined.provenance["commit"] == "abc1234; def5678" and joined.provenance["seeds"] == [0, 1]
    assert (joined.studies, joined.scale) == (["samia-fig6"], "small")


def test_rows_that_two_parts_share_count_once(tmp_path):
    first, second = tmp_path / "1.jsonl.xz", tmp_path / "2.jsonl.xz"
    a, b, c = (Row(model="m", dataset="d", seed=seed, metric="auc", value=0.5, extra={"round": 3}) for seed in range(3))
    write_archive(first, [a, a, b], {}, [FIGURE])
    later = replace(b, note="few; did not meet lira")
    write_archive(second, [later, c], {}, [FIGURE])
    joined = gather_runs([first, second])
    assert joined.rows == [a, a, later, c], "equal rows of one part are rows of that part, and no note is lost"
    assert gather_runs([second, first]).rows == [later, c, a, a]
    write_archive(first, [replace(b, note="did not meet lira")], {})
    assert [row.note for row in gather_runs([second, first]).rows] == ["few; did not meet lira", None]
    assert joined.figures == [FIGURE]


def test_runs_that_differ_in_what_both_measured_say_so(tmp_path):
    parts = [tmp_path / f"{number}.jsonl.xz" for number in range(3)]
    labels = {"model": "m", "dataset": "d", "pruner": "none", "seed": 0}
    row, other = (Row(**labels, metric="test_accuracy", value=value) for value in (0.46, 0.45))
    alike = Row(**labels, metric="loss", value=float("nan"))
    times = [Row(**labels, metric="seconds", value=value, timing=True) for value in (1.0, 2.0)]
    study = {"studies": ["samia-fig6"]}
    for part, rows in zip(parts, ([row, alike, times[0]], [other, alike], [row, alike, times[1]]), strict=True):
        write_archive(part, rows, study)
    for order in ((0, 2, 1), (1, 0), (1, 2, 0)):
        said = gather_runs([parts[place] for place in order]).provenance["differ"]
        assert said.startswith("runs differ in 1 measurements, such as test_accuracy of m, seed 0 (0.4"), order
    write_archive(joined := tmp_path / "joined.jsonl.xz", [row], study | {"differ": "runs differ in 5 measurements"})
    said = gather_runs([joined, parts[1]]).provenance["differ"]
    assert said.startswith("runs differ in 5 measurements; runs differ in 1 "), "an earlier count stays"
    same = gather_runs([parts[0], parts[2]])
    assert [one.metric for one in same.rows] == ["test_accuracy", "loss", "seconds", "seconds"]
    assert "differ" not in same.provenance, "a time differs from run to run"
    write_archive(parts[1], [row, other], study)  # its labels do not tell its two rows apart
    assert "differ" not in gather_runs(parts[:2]).provenance
    write_archive(parts[1], [other], {})
    assert "differ" not in gather_runs(parts[:2]).provenance, "an audit with other settings is no study"


def test_runs_of_several_scales_and_newer_archives_are_refused(tmp_path):
    parts = [tmp_path / f"{scale}.jsonl.xz" for scale in ("tiny", "full")]
    for part in parts:
        write_archive(part, rows_of(0), {"scale": part.name.partition(".")[0], "commit": "a1; b2"})
    with pytest.raises(WrongInput, match=r"several scales \(tiny, full\); archive them apart"):
        gather_runs(parts)
    write_archive(parts[1], rows_of(1), {"scale": "tiny", "commit": "b2; c3"})
    assert gather_runs(parts).provenance["commit"] == "a1; b2; c3"
    parts[0].write_bytes(lzma.compress(json.dumps({"schema": 99, "provenance": {}}).encode()))
    with pytest.raises(WrongInput, match="newer Secateur wrote it; upgrade first"):
        read_archive(parts[0])


def test_an_interrupted_run_is_archived_and_counted(runs):
    marker = runs[0] / "run.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"finished": None}))
    gathered = gather_runs(runs, commit="abc1234")
    assert len(gathered.rows) == 8 and gathered.provenance["unfinished"] == "a run was interrupted"
    (runs[0] / "results.jsonl").write_text("")
    with pytest.raises(WrongInput, match="no results yet"):
        gather_runs(runs[:1], commit="abc1234")


def test_one_command_archives_and_another_makes_page_and_table(runs, tmp_path, capsys):
    file, page = tmp_path / "fig6.jsonl.xz", tmp_path / "page.html"
    assert main(["report", *map(str, runs), "--rows", str(file), "--commit", "abc1234"]) == 0
    assert "8 rows" in capsys.readouterr().out
    assert main(["report", str(file), "--out", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "# samia-fig6" in printed and "commit abc1234" in printed and "seeds 0, 1" in printed
    assert "abc1234" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rows", "rows.csv"], "rows: rows.csv is no name of an archive; use NAME.jsonl.xz"),
        (["--rows", "rows.jsonl.xz", "--study", "samia-fig99"], "samia-fig99"),
    ],
)
def test_a_wrong_door_is_refused_before_any_work(runs, flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(runs[0]), *flags]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "rows.jsonl.xz").exists()


FIRST = {"schema": 2, "provenance": {}}
HOSTILE = {
    "no lines": [],
    "no provenance": [{"schema": 2}],
    "a provenance that is no object": [{"schema": 2, "provenance": ["x"]}],
    "a provenance without end": [{"schema": 2, "provenance": {"command": "x" * 30_000}}],
    "studies that are no list": [{"schema": 2, "provenance": {"studies": "samia-fig6"}}],
    "a group that is not there": [FIRST, {"group": 7, "metric": "auc", "value": 0.5}],
    "a picture": [FIRST, {"schema": 2, "figure": {"kind": "picture", "path": "/etc/passwd"}}],
    "a row that is a number": [FIRST, 3],
    "a row without a model": [FIRST, {"metric": "auc", "value": 0.5}],
}


@pytest.mark.parametrize("lines", HOSTILE.values(), ids=HOSTILE)
def test_an_archive_that_nobody_wrote_is_one_sentence(lines, tmp_path):
    file = tmp_path / "a.jsonl.xz"
    file.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    with pytest.raises(WrongInput, match="is no archive of rows"):
        read_archive(file)


FORGED = {
    "groups.jsonl": ["{}", '{"schema": 2, "note": 0}'],
    "figures.jsonl": ["{}"],
    "results.jsonl": ['{"schema": 1, "model": "m", "dataset": "d", "seed": 0, "metric": "auc", "value": {"a": 1}}'],
    "run.json": ['{"schema": 2, "seeds": 3}', '{"schema": 2, "seeds": [[0], "1", 2]}'],
}


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in FORGED.items() for line in lines])
def test_a_forged_run_is_refused_in_one_sentence(name, line, runs, tmp_path, capsys):
    file = tmp_path / "a.jsonl.xz"
    (runs[0] / name).write_text(line + "\n")
    assert main(["report", *map(str, runs), "--rows", str(file), "--commit", "abc1234"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("secateur: ") and said.count("secateur: ") == 1 and "internal" not in said
    assert not file.exists()


def test_damage_and_bombs_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl.xz"
    whole = lzma.compress(json.dumps(FIRST).encode())
    for content in (b"", b"PK", whole[:-3], whole + b"more", lzma.compress(b"[" * 100_000)):
        file.write_bytes(content)
        with pytest.raises(WrongInput, match="is no archive of rows"):
            read_archive(file)
    monkeypatch.setattr(archive, "MOST_BYTES", 1000)
    file.write_bytes(lzma.compress(b" " * 10_000_000))
    with pytest.raises(WrongInput, match="decompresses to more than"):
        read_archive(file)
    with pytest.raises(WrongInput, match="is no file"):
        read_archive(tmp_path / "absent.jsonl.xz")


def test_an_archive_prints_no_escape_and_no_line_of_its_own(tmp_path, monkeypatch, capsys):
    file, forged = tmp_path / "a.jsonl.xz", "a\x1b[31mb\nsecateur: within the limits"
    rows = [Row(**LABELS | {"model": forged}, seed=0, metric="test_accuracy", value=0.5)]
    words = {name: forged for name in ("scale", "commit", "machine", "command", forged)}
    write_archive(file, rows, words | {"studies": ["samia-fig6"]})
    monkeypatch.setattr("typer.echo", lambda text="", err=False: print(text))  # as on a terminal, with escapes
    for flags in (["--out", tmp_path / "page.html"], ["--rows", tmp_path / "b.jsonl.xz"]):
        assert main(["report", str(file), *map(str, flags)]) == 0
        said = capsys.readouterr().out
        assert "secateur: within" in said and "\x1b" not in said and "\nsecateur: within" not in said
    write_archive(file, [Row(**LABELS, seed=forged, metric="test_accuracy", value=0.5)], {"studies": ["samia-fig6"]})
    assert main(["report", str(file), "--out", str(tmp_path / "page.html")]) == 2
    assert "\nsecateur: within" not in capsys.readouterr().err


def test_an_archive_with_an_unknown_study_is_refused(tmp_path, capsys):
    write_archive(tmp_path / "a.jsonl.xz", rows_of(0), {"studies": ["samia-fig99"]})
    assert main(["report", str(tmp_path / "a.jsonl.xz"), "--out", str(tmp_path / "page.html")]) == 2
    assert "samia-fig99" in capsys.readouterr().err


def test_a_dictionary_of_four_gigabytes_and_a_pipe_are_refused(tmp_path):
    file, content = tmp_path / "a.jsonl.xz", bytearray(lzma.compress(json.dumps(FIRST).encode() + b"\n"))
    size = 4 * (content[12] + 1)  # of the header of the block, after the 12 bytes of the stream's
    assert content[14:16] == b"\x21\x01"  # LZMA2, with one byte that codes the size of its dictionary
    content[16] = 40
    content[12 + size - 4 : 12 + size] = zlib.crc32(content[12 : 12 + size - 4]).to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(WrongInput, match="Memory usage limit"):
        read_archive(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(WrongInput, match="is no file"):
        read_archive(file)


def test_a_small_file_never_becomes_many_lines(tmp_path, monkeypatch):
    """Lines of two bytes take twenty times as much as objects, so the file's size bounds them."""
    file = tmp_path / "a.jsonl.xz"
    file.write_bytes(lzma.compress(b"0\n" * 600_000))
    with pytest.raises(WrongInput, match="decompresses to more than 1 MiB"):
        read_archive(file)
    monkeypatch.setattr(archive, "FREE_BYTES", 1000)
    rows = [Row(**LABELS, seed=0, metric="auc", value=0.5)] * 5000
    with pytest.raises(WrongInput, match="archive fewer runs at once"):
        write_archive(tmp_path / "b.jsonl.xz", rows, {})  # nobody could read it
    assert not (tmp_path / "b.jsonl.xz").exists()
