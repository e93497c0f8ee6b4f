"""Fetching data from a server that misbehaves, and verifying what is there."""

import gzip
import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import gxd_command as cli
from gxd.lab.data import fetch
from gxd.lab.errors import UserError


class Server(ThreadingHTTPServer):
    """Serves ``files``; misbehaves as told."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests = {}, []  # name -> bytes; (name, Range header)
        self.ranges, self.drop_after, self.drops, self.errors = True, None, 0, []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, name = self.server, self.path.lstrip("/")
        wanted = self.headers.get("Range")
        server.requests.append((name, wanted))
        if server.errors:
            return self.send_error(server.errors.pop(0))
        if name not in server.files:
            return self.send_error(404)
        content, start = server.files[name], 0
        if wanted and server.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        if server.drops:
            server.drops -= 1
            body = body[: server.drop_after]
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(fetch, "PAUSE", 0.0)
    monkeypatch.setattr(fetch, "BLOCK", 1000)
    monkeypatch.delenv("GXD_MIRROR", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


CONTENT = bytes(torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8))
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()


def names(root):
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.name != ".fetch.lock")


def test_a_download_arrives_and_progress_is_told(server, tmp_path):
    server.files["a.gz"] = CONTENT
    told = []
    fetch.download(server.url + "a.gz", tmp_path / "a.gz", MD5, lambda *now: told.append(now))
    assert (tmp_path / "a.gz").read_bytes() == CONTENT and names(tmp_path) == ["a.gz"]
    assert told[0] == ("a.gz", 0, 20_000) and told[-1] == ("a.gz", 20_000, 20_000) and len(told) > 10


def test_a_part_file_is_gone_on_with(server, tmp_path):
    server.files["a.gz"] = CONTENT
    (tmp_path / "a.gz.part").write_bytes(CONTENT[:12_345])
    fetch.download(server.url + "a.gz", tmp_path / "a.gz", MD5)
    assert (tmp_path / "a.gz").read_bytes() == CONTENT and server.requests == [("a.gz", "bytes=12345-")]


def test_a_dropped_connection_is_taken_up_where_it_broke(server, tmp_path):
    server.files["a.gz"], server.drop_after, server.drops = CONTENT, 6_000, 3
    fetch.download(server.url + "a.gz", tmp_path / "a.gz", MD5)
    assert (tmp_path / "a.gz").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=6000-", "bytes=12000-", "bytes=18000-"][:4]


def test_a_connection_that_keeps_breaking_leaves_a_part_to_go_on_with(server, tmp_path):
    server.files["a.gz"], server.drop_after, server.drops = CONTENT, 0, 100
    (tmp_path / "a.gz.part").write_bytes(CONTENT[:500])
    with pytest.raises(UserError, match=r"broke off at 500 of 20000 bytes.*the 500 bytes that came are kept"):
        fetch.download(server.url + "a.gz", tmp_path / "a.gz", MD5)
    assert names(tmp_path) == ["a.gz.part"] and (tmp_path / "a.gz.part").read_bytes() == CONTENT[:500]
    server.drops = 0
    fetch.download(server.url + "a.gz", tmp_path / "a.gz", MD5)
    assert (tmp_path / "a.gz").read_bytes() == CONTENT


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.files["a.gz"], server.ranges = CONTENT, False
    (tmp_path / "a.gz.part").write_bytes(CONTENT[:12_345])
    fetch.download(server.url + "a.gz", tmp_path / "a.gz", MD5)
    assert (tmp_path / "a.gz").read_bytes() == CONTENT


def test_a_server_without_ranges_that_always_breaks_is_given_up(server, tmp_path):
    server.files["a.gz"], server.ranges, server.drop_after, server.drops = CONTENT, False, 6_000, 100
    with pytest.raises(UserError, match="broke off at 6000 of 20000"):
        fetch.download(server.url + "a.gz", tmp_path / "a.gz", MD5)


def test_a_complete_part_file_needs_no_more_bytes(server, tmp_path):
    server.files["a.gz"] = CONTENT
    (tmp_path / "a.gz.part").write_bytes(CONTENT)
    fetch.download(server.url + "a.gz", tmp_path / "a.gz", MD5)
    assert names(tmp_path) == ["a.gz"]


def test_a_wrong_checksum_removes_the_part_and_says_so(server, tmp_path):
    server.files["a.gz"] = CONTENT[:-1] + b"?"
    with pytest.raises(UserError, match=r"a.gz has the wrong checksum \(md5 .*\): the download was removed"):
        fetch.download(server.url + "a.gz", tmp_path / "a.gz", MD5)
    assert names(tmp_path) == []
    server.files["a.gz"] = CONTENT
    (tmp_path / "a.gz.part").write_bytes(b"of another file, and longer" * 1000)
    with pytest.raises(UserError, match="removed"):
        fetch.download(server.url + "a.gz", tmp_path / "a.gz", MD5)
    fetch.download(server.url + "a.gz", tmp_path / "a.gz", MD5)
    assert names(tmp_path) == ["a.gz"]


def test_a_missing_file_and_a_server_in_trouble(server, tmp_path):
    with pytest.raises(UserError, match=r"b.gz answers 404 Not Found: name a mirror .*--url"):
        fetch.download(server.url + "b.gz", tmp_path / "b.gz", MD5)
    assert len(server.requests) == 1  # asking again would not help
    server.files["b.gz"], server.errors = CONTENT, [503, 503]
    fetch.download(server.url + "b.gz", tmp_path / "b.gz", MD5)
    server.errors = [503] * 9
    with pytest.raises(UserError, match=r"cannot fetch .*503 Service Unavailable"):
        fetch.download(server.url + "b.gz", tmp_path / "c.gz", MD5)


def test_nobody_there(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "PAUSE", 0.0)
    with pytest.raises(UserError, match=r"cannot fetch http://127.0.0.1:1/a.gz \(.*refused.*\): check the connection"):
        fetch.download("http://127.0.0.1:1/a.gz", tmp_path / "a.gz", MD5)
    assert names(tmp_path) == []


# --- data sets --------------------------------------------------------------------------------------------------------


def checksum(content, algorithm="sha256"):
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


def packed(members):
    """A tar.gz of name -> bytes, or of ready members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size, info.mode = len(content), 0o4777
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def sources(server, members=None):
    """A small MNIST and CIFAR-100 on the server."""
    train, test = CONTENT[:3000], CONTENT[3000:7000]
    members = members or {"other/train.bin": b"not this", "./small/train.bin": train, "small/test.bin": test}
    archive, image = packed(members), gzip.compress(CONTENT)
    server.files |= {"small.tar.gz": archive, "images.gz": image}
    files = {"small/train.bin": checksum(train), "small/test.bin": checksum(test)}
    tar = fetch.Archive("small.tar.gz", "", checksum(archive, "md5"), files)
    idx_file = fetch.Archive("images.gz", "MNIST/raw", checksum(image, "md5"), {"MNIST/raw/images": checksum(CONTENT)})
    return fetch.Source("small", server.url, (tar,)), fetch.Source("digits", server.url, (idx_file,))


def test_a_data_set_is_fetched_unpacked_and_then_left_alone(server, tmp_path):
    for source, files in zip(sources(server), (["small/test.bin", "small/train.bin"], ["MNIST/raw/images"])):
        root = tmp_path / source.title
        assert set(fetch.verify(source, root).values()) == {"missing"}
        fetch.fetch(source, root)
        assert names(root) == files  # neither the archive nor anything else in it
        assert set(fetch.verify(source, root).values()) == {"ok"}
        asked = len(server.requests)
        fetch.fetch(source, root)
        assert len(server.requests) == asked


def test_a_file_that_is_wrong_is_replaced(server, tmp_path):
    source, _ = sources(server)
    fetch.fetch(source, tmp_path)
    (tmp_path / "small" / "test.bin").write_bytes(b"damaged")
    assert fetch.verify(source, tmp_path) == {"small/train.bin": "ok", "small/test.bin": "wrong"}
    fetch.fetch(source, tmp_path)
    assert set(fetch.verify(source, tmp_path).values()) == {"ok"}


def test_a_gzipped_file_that_is_there_is_good_enough_and_is_kept(server, tmp_path):
    _, source = sources(server)
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "images.gz").write_bytes(server.files["images.gz"])
    assert fetch.verify(source, tmp_path) == {"MNIST/raw/images.gz": "ok"}
    fetch.fetch(source, tmp_path)
    assert server.requests == [] and names(tmp_path) == ["MNIST/raw/images", "MNIST/raw/images.gz"]


@pytest.mark.parametrize(
    "members",
    [
        {"small/train.bin": CONTENT[:3000]},  # one is missing
        {"small/train.bin": CONTENT[:3000], "small/test.bin": "/etc/passwd"},  # one is a link
        {"small/train.bin": CONTENT[:3000], "../small/test.bin": CONTENT[3000:7000]},
    ],
)
def test_an_archive_is_not_trusted(server, tmp_path, members):
    source, _ = sources(server, members)
    root = tmp_path / "data"
    with pytest.raises(UserError, match=r"has no file small/test.bin"):
        fetch.fetch(source, root)
    assert names(tmp_path) == ["data/small.tar.gz", "data/small/train.bin"]


def test_a_member_with_the_wrong_content_gets_no_name(server, tmp_path):
    source, _ = sources(server, {"small/train.bin": CONTENT[:2999], "small/test.bin": CONTENT[3000:7000]})
    with pytest.raises(UserError, match=r"train.bin, as unpacked, has the wrong checksum"):
        fetch.fetch(source, tmp_path)
    assert names(tmp_path) == ["small.tar.gz"]


def test_an_unwritten_member_leaves_nothing_behind(server, tmp_path, monkeypatch):
    source, _ = sources(server)

    def full(content, file, block):
        file.write(content.read(100))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        fetch.fetch(source, tmp_path)
    assert names(tmp_path) == ["small.tar.gz"]
    monkeypatch.undo()
    fetch.fetch(source, tmp_path)
    assert names(tmp_path) == ["small.tar.gz", "small/test.bin", "small/train.bin"]


def test_a_second_process_is_kept_away(server, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    source, _ = sources(server)
    with open(tmp_path / ".fetch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is fetching"):
            fetch.fetch(source, tmp_path)
    fetch.fetch(source, tmp_path)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(server, monkeypatch):
    source, digits = sources(server)
    monkeypatch.setattr(fetch, "SOURCES", {"mnist": digits, "cifar100": source})
    return server


def test_the_command_fetches_and_verifies(small, tmp_path, capsys):
    where = ["--data-dir", str(tmp_path)]
    assert cli.main(["data", "verify", "cifar100", *where]) == 2
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"missing {tmp_path}/small/train.bin", f"missing {tmp_path}/small/test.bin"]
    remedy = f"gxd data fetch cifar100 --data-dir {tmp_path}"
    assert said.err == f"gxd: 2 files are wrong or missing: `{remedy}` puts that right\n"
    assert cli.main(["data", "fetch", "cifar100", *where]) == 0
    assert f"small is in {tmp_path}" in capsys.readouterr().out
    assert cli.main(["data", "verify", "cifar100", *where]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"ok      {tmp_path}/small/train.bin"
    (tmp_path / "small" / "train.bin").write_bytes(b"x")
    assert cli.main(["data", "verify", "cifar100", *where]) == 2
    said = capsys.readouterr()
    assert "wrong" in said.out and "1 file is wrong or missing" in said.err


def test_a_mirror_is_used_when_named(small, tmp_path, monkeypatch):
    small.files["mirror/images.gz"] = small.files["images.gz"]
    monkeypatch.setenv("GXD_DATA", str(tmp_path))
    monkeypatch.setenv("GXD_MIRROR", small.url + "mirror")
    assert cli.main(["data", "fetch", "mnist"]) == 0
    assert cli.main(["data", "fetch", "cifar100", "--url", small.url]) == 0
    assert [name for name, _ in small.requests] == ["mirror/images.gz", "small.tar.gz"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["fetch", "mnisst"], "mnisst"),
        (["fetch", "mnist", "--url", "ftp://server"], "'ftp://server/' is no address of a server"),
        (["fetch", "mnist", "--url", "http://[bad"], "'http://[bad/' is no address of a server"),
        (["fetch", "mnist", "--url", "http://server:port"], "'http://server:port/' is no address of a server"),
        (
            ["fetch", "mnist", "--data-dir", "/dev/null"],
            "cannot write to /dev/null (File exists): choose another place",
        ),
        (["fetch", "mnist", "--url", "http://127.0.0.1:1/"], "cannot fetch"),
    ],
)
def test_a_mistake_gets_one_line(small, tmp_path, capsys, monkeypatch, argv, words):
    monkeypatch.setenv("GXD_DATA", str(tmp_path))
    assert cli.main(["data", *argv]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said and len(said.splitlines()) == 1
    assert names(tmp_path) == []
