"""Run folders that come from somebody else: no command follows a link in one, or believes a path in it."""

import hashlib
import json
import os
import stat

import pytest
import torch
import yaml

from secateur.cli import main
from secateur.errors import WrongInput
from secateur.evaluation.gallery import picture, save
from secateur.runs.artifacts import Result, decode, encode, write
from secateur.runs.folder import load_rows, open_run
from secateur.runs.rows import Row

ROW = Row(model="mlp", dataset="digits", seed=0, metric="auc", value=0.5, attack="conf")
SECRET = "ssh-ed25519 mine\n"


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    with open_run(folder, "audit", {"model": "mlp"}, seeds=[0]) as run:
        run.add([ROW])
    return folder


@pytest.fixture
def treasure(tmp_path):
    """A file of the user's that no command may change or show."""
    path = tmp_path / "home" / "authorized_keys"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("name", [".report.html.tmp", "report.html", ".lock", "config.yaml", "results.jsonl"])
def test_a_link_to_a_file_is_refused_and_its_target_unchanged(run_folder, treasure, name, capsys):
    (run_folder / name).unlink(missing_ok=True)
    (run_folder / name).symlink_to(treasure)
    for flags in ([], ["--rows", str(run_folder.parent / "a.jsonl.xz"), "--commit", "abc1234"]):
        assert main(["report", str(run_folder), *flags]) == 2
        assert "link" in capsys.readouterr().err
    with pytest.raises(WrongInput, match="link"), open_run(run_folder, "audit", {"model": "other"}):
        pass
    assert treasure.read_text() == SECRET


@pytest.mark.parametrize("name", ["pictures", "unfinished", "artifacts"])
def test_a_link_to_a_folder_is_refused_and_its_files_are_there(run_folder, treasure, name, capsys):
    for file in ("holiday.png", ".notes.tmp", "state.jsonl"):
        (treasure.parent / file).write_text("mine")
    if name == "artifacts":
        (run_folder / name).rmdir()
    (run_folder / name).symlink_to(treasure.parent)
    assert main(["report", str(run_folder)]) == 2
    with pytest.raises(WrongInput, match="link"), open_run(run_folder, "audit", {"model": "other"}):
        pass
    assert len(list(treasure.parent.iterdir())) == 4


def test_a_pipe_is_refused_and_does_not_hang(run_folder):
    os.mkfifo(run_folder / "groups.jsonl.old")
    with pytest.raises(WrongInput, match="no plain file"):
        load_rows(run_folder)


def test_a_second_name_of_a_users_file_is_not_emptied_by_the_lock(run_folder, treasure):
    (run_folder / ".lock").unlink()
    os.link(treasure, run_folder / ".lock")
    with pytest.raises(WrongInput, match="second name"), open_run(run_folder, "audit", {"model": "mlp"}):
        pass
    assert treasure.read_text() == SECRET


def test_a_folder_named_by_the_user_through_a_link_works(run_folder, tmp_path):
    (tmp_path / "latest").symlink_to(run_folder)
    assert load_rows(tmp_path / "latest") == [ROW]


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "..", "", "a/b"])
def test_a_piece_of_a_sweep_never_lies_outside_of_it(run_folder, name, capsys):
    piece = {"name": name, "run": "r", "state": "done", "said": None}
    (run_folder / "pieces.jsonl").write_text(json.dumps(piece) + "\n")
    assert main(["report", str(run_folder)]) == 2
    assert "pieces.jsonl is damaged at line 1" in capsys.readouterr().err


def test_a_link_under_the_name_of_a_file_is_replaced_not_followed(tmp_path, treasure):
    page = tmp_path / "page.html"
    page.symlink_to(treasure)
    write(page, b"new")
    assert treasure.read_text() == SECRET
    assert page.read_text() == "new" and not page.is_symlink()


def test_only_the_user_reads_a_run_and_a_page_with_pictures(tmp_path, run_folder):
    assert stat.S_IMODE(run_folder.stat().st_mode) == 0o700
    write(tmp_path / "page.html", b"pictures", private=True)
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o600


def test_files_of_a_run_are_the_users_alone_in_a_folder_that_was_there(tmp_path):
    (tmp_path / "shared").mkdir(mode=0o755)
    with open_run(tmp_path / "shared", "audit", {"model": "mlp"}) as run:
        run.add([ROW])
    assert stat.S_IMODE((tmp_path / "shared" / "artifacts").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "shared" / "results.jsonl").stat().st_mode) == 0o600
    save(tmp_path / "pictures", [picture({"seed": 0, "attack": "x" * 400}, torch.zeros(1, 2, 2), target=0, item=0)])
    (file,) = (tmp_path / "pictures").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["w"].update(shape=[1 << 40]),
        lambda header: header["w"].update(shape=["many"]),
        lambda header: header["w"].update(data_offsets=[0, 1 << 40]),
        lambda header: header["w"].update(data_offsets=[-4, 0]),
        lambda header: header["w"].update(dtype="?"),
        lambda header: header.pop("w"),
        lambda header: header.update(w=3),
    ],
)
def test_a_forged_artifact_with_a_right_checksum_is_computed_again(change):
    content = encode(Result({"w": torch.zeros(3)}, {"a": 1}), "key")
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    forged = bytearray(len(text).to_bytes(8, "little") + text + content[begin:])
    place = forged.index(b'\\"checksum\\":\\"') + len(b'\\"checksum\\":\\"')
    forged[place : place + 64] = b"0" * 64
    forged[place : place + 64] = hashlib.sha256(forged).hexdigest().encode()
    assert decode(content, "key") is not None
    assert decode(bytes(forged), "key") is None


def test_one_entry_of_any_stride_is_saved():
    value = torch.arange(148.0)[::74][:1]
    saved = decode(encode(Result({"w": value}), "key"), "key")
    assert saved.tensors["w"].tolist() == [0.0]


def test_temporary_names_of_two_writers_differ(tmp_path, monkeypatch):
    names = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: names.append(str(path)) or real(path, *rest))
    for _ in range(2):
        write(tmp_path / "rows", b"x")
    temporary = [name for name in names if name.endswith(".tmp")]
    assert len(set(temporary)) == 2


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"a: [1", b"a: &x [*x]\n", b"- 1\n", b"limits: {auc: many}\n", b"limits: 3\n"],
    ids=["not UTF-8", "not closed", "alias", "a list", "no number", "no fields"],
)
def test_a_damaged_configuration_is_one_sentence(run_folder, content, capsys):
    (run_folder / "config.yaml").write_bytes(content)
    for arguments in (["report", str(run_folder)], ["report", str(run_folder), "--format", "md"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") <= 2


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a": ' * 50, '"text"', '{"secateur": "1", "schema": 1, "seeds": 3}']
)
def test_a_damaged_marker_is_one_sentence(run_folder, content, capsys):
    (run_folder / "run.json").write_text(content)
    assert main(["report", str(run_folder)]) == 2
    assert "not the folder of a run" in capsys.readouterr().err


def test_the_configuration_of_a_run_is_still_yaml(run_folder):
    assert yaml.safe_load((run_folder / "config.yaml").read_text())["model"] == "mlp"


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "roc"}',
        "{}",
        '{"kind": ["roc"]}',
        '{"kind": "picture", "attack": null}',
        "[]",
        '{"kind": "histogram"}',
    ],
)
def test_a_figure_that_no_run_writes_is_one_sentence(run_folder, line, capsys):
    (run_folder / "figures.jsonl").write_text(line + "\n")
    assert main(["report", str(run_folder)]) in (0, 2)
    message = capsys.readouterr().err
    assert message.count("\n") <= 1 and "internal error" not in message


@pytest.mark.parametrize("name", ["sparsity", "value", "metric"])
@pytest.mark.parametrize("value", [[1], "x"], ids=str)
def test_a_row_that_no_run_writes_is_one_sentence(run_folder, name, value, capsys):
    (run_folder / "results.jsonl").write_text(json.dumps(ROW.to_json() | {name: value}) + "\n")
    assert main(["report", str(run_folder)]) in (0, 2)
    assert main(["report", str(run_folder), "--format", "md"]) in (0, 2)
    assert "internal error" not in capsys.readouterr().err
