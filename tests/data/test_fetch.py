import http.server
import threading
from hashlib import md5, sha256
from pathlib import Path

import pytest

from secateur.data.fetch import SHA256, PublicFile, cache, fetch, find, md5_of
from secateur.errors import WrongInput

CONTENT = bytes(range(256)) * 5000
SUM = md5(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/missing.bin":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path != "/unsized.bin":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:1000] if self.path == "/short.bin" else CONTENT)

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """No place of the real user is looked at or written to, and no proxy is asked."""
    monkeypatch.delenv("SECATEUR_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture(scope="module")
def server():
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_address[1]}"
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.mark.parametrize("name", ["file.bin", "unsized.bin"])
def test_a_download_goes_to_the_cache_once(server, tmp_path, name, capfd):
    source = PublicFile(f"set/raw/{name}", f"{server}/{name}", SUM)
    path = fetch(source)
    assert path == tmp_path / "cache/secateur/set/raw" / name
    assert md5_of(path) == SUM
    assert fetch(PublicFile(source.path, "http://127.0.0.1:9/none", SUM)) == path  # found, so no address is asked
    out, err = capfd.readouterr()
    assert out == ""
    assert name in err
    assert not list(tmp_path.rglob("*.part"))


def test_a_named_folder_gets_the_download(server, tmp_path):
    (tmp_path / "mine").mkdir()
    path = fetch(PublicFile("set/file.bin", f"{server}/file.bin", SUM), tmp_path / "mine")
    assert path == tmp_path / "mine/set/file.bin"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "word"),
    [("file.bin", "published is 0000"), ("missing.bin", "Not Found"), ("short.bin", "after 1000 of")],
)
def test_a_bad_download_leaves_nothing(server, tmp_path, name, word):
    source = PublicFile(f"set/{name}", f"{server}/{name}", "0000")
    with pytest.raises(WrongInput) as caught:
        fetch(source)
    message = str(caught.value)
    for part in (name, word, source.address, str(tmp_path / "cache/secateur/set" / name)):
        assert part in message
    assert "\n" not in message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_no_network_is_one_sentence(tmp_path):
    source = PublicFile("set/file.bin", "http://127.0.0.1:9/file.bin", SUM)  # port 9: nobody listens
    with pytest.raises(WrongInput, match=r"file\.bin is missing and could not be downloaded .*refused.*put it at"):
        fetch(source)
    with pytest.raises(WrongInput, match="downloads are turned off"):
        fetch(source, download=False)


def test_no_room_is_one_sentence(server, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("secateur.data.fetch._copy", full)
    with pytest.raises(WrongInput, match="No space left"):
        fetch(PublicFile("file.bin", f"{server}/file.bin", SUM))
    assert not list(tmp_path.rglob("*.part"))


def put(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"here")
    return path


def test_the_order_of_places(tmp_path, monkeypatch):
    named, environment = tmp_path / "named", tmp_path / "environment"
    monkeypatch.setenv("SECATEUR_DATA", str(environment))
    wanted = ["a/b/file", "other"]
    assert find(wanted) is None
    cached = put(cache() / "other")
    assert find(wanted) == cached
    from_environment = put(environment / "a/b/file")
    assert find(wanted) == from_environment
    named.mkdir()
    assert find(wanted, named) is None  # a named folder is the only one looked into
    in_named = put(named / "a/b/file")
    assert find(wanted, named) == in_named
    with pytest.raises(WrongInput, match="is not a folder"):
        find(wanted, tmp_path / "nowhere")


def test_a_named_folder_may_be_the_inner_one(tmp_path):
    file = put(tmp_path / "MNIST/raw/x.gz")
    for folder in (tmp_path, tmp_path / "MNIST", tmp_path / "MNIST/raw"):
        assert find(["MNIST/raw/x.gz"], folder) == file
    assert find(["FashionMNIST/raw/x.gz"], tmp_path / "MNIST") is None
    assert find(["MNIST/raw"], tmp_path / "MNIST/raw") == tmp_path / "MNIST/raw"


def test_the_cache_without_a_variable(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache() == Path.home() / ".cache/secateur"


@pytest.mark.parametrize("address", ["http://example.org/file.bin", "ftp://example.org/file.bin", "file:///etc/passwd"])
def test_only_https_is_asked(address, tmp_path):
    with pytest.raises(WrongInput, match="is not https"):
        fetch(PublicFile("set/file.bin", address, SUM))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_every_address_is_https_and_a_file_without_a_sha256_is_named(server, caplog):
    from secateur.catalogue import methods

    sources = [str(entry.info["source"]) for entry in methods("dataset").values()]
    assert not [source for source in sources if source.startswith("http:")]
    fetch(PublicFile("set/a.bin", f"{server}/file.bin", SUM))
    fetch(PublicFile("set/b.bin", f"{server}/file.bin"))
    assert "its md5 alone" in caplog.text and "no checksum is published" in caplog.text


def test_a_file_with_the_md5_and_another_sha256_is_refused(server, monkeypatch, tmp_path):
    monkeypatch.setitem(SHA256, SUM, "0" * 64)
    with pytest.raises(WrongInput, match="forged"):
        fetch(PublicFile("set/file.bin", f"{server}/file.bin", SUM))
    monkeypatch.setitem(SHA256, SUM, sha256(CONTENT).hexdigest())
    assert fetch(PublicFile("set/file.bin", f"{server}/file.bin", SUM)).read_bytes() == CONTENT
