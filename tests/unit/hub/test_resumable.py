"""Downloads that go on, from a file server whose faults are chosen one by one."""

import hashlib

import pytest

from specinfer.errors import DownloadError
from specinfer.hub import resumable
from specinfer.hub.catalogue import SourceUnavailableError
from specinfer.hub.resumable import UnopenableError, download, partial_of
from specinfer.progress import NoProgress as NoProgress

from .file_server import FileServer
from .test_wheel_pull import Recorder

DATA = bytes(range(256)) * 40
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(resumable, "PAUSES", (0.0, 0.0))
    with FileServer(DATA) as server:
        yield server


def fetch(server, target, progress=None, sha256=SHA256):
    download(f"{server.url}/file", target, sha256, progress or NoProgress(), "label")
    assert not partial_of(target).exists()
    return target.read_bytes()


def test_a_whole_file_in_one_go(server, tmp_path):
    progress = Recorder()
    assert fetch(server, tmp_path / "file", progress) == DATA
    assert progress.pieces == [["label", len(DATA), len(DATA), "closed"]]
    assert server.ranges == [None]


def test_each_break_is_followed_by_a_request_for_the_rest_on_the_same_bar(server, tmp_path):
    server.break_after = [1000, 2000]
    progress = Recorder()
    assert fetch(server, tmp_path / "file", progress) == DATA
    assert server.ranges == [None, "bytes=1000-", "bytes=3000-"]
    assert progress.pieces == [["label", len(DATA), len(DATA), "closed"]]


def test_a_partial_file_of_an_earlier_time_counts(server, tmp_path):
    partial_of(tmp_path / "file").write_bytes(DATA[:700])
    progress = Recorder()
    assert fetch(server, tmp_path / "file", progress) == DATA
    assert server.ranges == ["bytes=700-"]
    assert progress.pieces == [["label", len(DATA), len(DATA), "closed"]]


def test_a_server_without_ranges_is_heard_from_the_start_and_the_bar_begins_anew(server, tmp_path):
    server.ignores_ranges = True
    server.break_after = [1000]
    progress = Recorder()
    assert fetch(server, tmp_path / "file", progress) == DATA
    assert server.ranges == [None, "bytes=1000-"]
    assert progress.pieces == [["label", len(DATA), 1000, "open"], ["label", len(DATA), len(DATA), "closed"]]


def test_a_partial_file_that_is_longer_than_the_file_is_dropped(server, tmp_path):
    partial_of(tmp_path / "file").write_bytes(DATA + b"more")
    assert fetch(server, tmp_path / "file") == DATA
    assert server.ranges == [f"bytes={len(DATA) + 4}-", None]


def test_a_partial_file_that_is_whole_already_is_taken(server, tmp_path):
    partial_of(tmp_path / "file").write_bytes(DATA)
    assert fetch(server, tmp_path / "file") == DATA
    assert server.ranges == [f"bytes={len(DATA)}-"]


def test_a_part_that_begins_elsewhere_is_not_appended(server, tmp_path):
    partial_of(tmp_path / "file").write_bytes(DATA[:700])
    server.starts_late = 1
    assert fetch(server, tmp_path / "file") == DATA
    assert server.ranges == ["bytes=700-", None]


def test_wrong_bytes_are_deleted_and_told(server, tmp_path):
    server.data = b"!" + DATA[1:]
    with pytest.raises(SourceUnavailableError, match=r"arrived damaged and was deleted.*pull again"):
        fetch(server, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_an_answer_of_unknown_length_is_read_to_its_end_and_a_broken_one_again(server, tmp_path):
    server.chunked = True
    server.break_after = [3000]
    progress = Recorder()
    assert fetch(server, tmp_path / "file", progress, sha256=None) == DATA
    assert server.ranges[0] is None
    assert len(server.ranges) == 2
    assert progress.pieces[0][1] is None


def test_a_busy_server_is_asked_again_once_it_had_answered(server, tmp_path):
    partial_of(tmp_path / "file").write_bytes(DATA[:700])
    server.statuses = [503, 429]
    assert fetch(server, tmp_path / "file") == DATA
    assert server.ranges == ["bytes=700-"] * 3


def test_too_many_breaks_keep_what_came(server, tmp_path):
    server.break_after = [1000, 1000, 1000]
    with pytest.raises(
        SourceUnavailableError, match=r"broke 3 times, at last with 3\.0 kB of 10\.2 kB"
    ) as info:
        fetch(server, tmp_path / "file")
    assert str(info.value).endswith("(the connection ended early); the next pull goes on from there")
    assert partial_of(tmp_path / "file").read_bytes() == DATA[:3000]
    assert fetch(server, tmp_path / "file") == DATA


def test_a_server_that_never_answers_is_left_to_another_way_and_the_partial_file_stays(server, tmp_path):
    nobody = "http://127.0.0.1:1/file"
    with pytest.raises(UnopenableError, match="refused"):
        download(nobody, tmp_path / "file", SHA256, NoProgress(), "label")
    partial_of(tmp_path / "file").write_bytes(DATA[:700])
    with pytest.raises(UnopenableError, match="refused"):
        download(nobody, tmp_path / "file", SHA256, NoProgress(), "label")
    assert partial_of(tmp_path / "file").read_bytes() == DATA[:700]


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/file", "http://a:b@127.0.0.1:80/file", "http:///file"])
def test_addresses_that_cannot_be_opened(url, tmp_path):
    with pytest.raises(UnopenableError):
        download(url, tmp_path / "file", SHA256, NoProgress(), "label")


def test_a_full_disk_is_told_and_left_no_fuller(server, tmp_path):
    partial_of(tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(DownloadError, match="is full; the partial file was removed"):
        fetch(server, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_keeps_every_byte_that_was_counted(server, tmp_path):
    class Interrupting(Recorder):
        def advance(self, n):
            super().advance(n)
            if self.pieces[-1][2] >= 1500:
                raise KeyboardInterrupt

    server.break_after = [1000, 500]
    with pytest.raises(KeyboardInterrupt):
        fetch(server, tmp_path / "file", Interrupting())
    assert partial_of(tmp_path / "file").read_bytes() == DATA[:1500]
    assert fetch(server, tmp_path / "file") == DATA
    assert server.ranges == [None, "bytes=1000-", "bytes=1500-"]
