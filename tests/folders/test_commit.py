"""The commit protocol against what disks and people do:
kills at every step, full disks, flipped bits, missing files.
"""

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vblackwell.errors import ConfigurationError, CorruptData, DiskError
from vblackwell.folders import commit
from vblackwell.folders.commit import (
    CommitFolder,
    clean_leftovers,
    first_intact,
    newest_complete,
    numbered,
    prune,
    verify_folder,
)

# In a copy of a folder for each time that a system call of the commit runs: a process that kills itself right before.
# Prints their exit codes, until one was not killed. argv: where the copies go, the folder, the call.
KILLED = textwrap.dedent("""
    import itertools, os, shutil, signal, sys
    from pathlib import Path
    from vblackwell.folders.commit import CommitFolder, prune

    for count in itertools.count(1):  # a fork need not import anything again
        parent = shutil.copytree(sys.argv[2], Path(sys.argv[1], str(count)))
        child = os.fork()
        if child == 0:
            break
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code)
        if code == 0:
            sys.exit()
    call = sys.argv[3]
    real, seen = getattr(os, call), 0

    def counted(*args, **options):
        global seen
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(os, call, counted)
    for number in (2, 3, 3):
        with CommitFolder(parent, f"step-{number}") as folder:
            folder.add("a.bin", bytes([number]) * 100_000)
            folder.add("tokenizer.json", b"the same for all")
        prune(parent, 2)
    os._exit(0)
""")


def write(parent: Path, number: int, **files: bytes) -> Path:
    with CommitFolder(parent, f"step-{number}") as folder:
        for name, data in ({"a": bytes([number]) * 1000} | files).items():
            folder.add(f"{name}.bin", data)
    return parent / f"step-{number}"


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "unlink", "rmdir"])
def test_kill_at_every_step_of_the_commit(tmp_path, call):
    """Whatever call a kill comes before, each folder with a committed name is complete, and there is at least one."""
    whole, copies = write(tmp_path / "whole", 1).parent, tmp_path / "copies"
    command = [sys.executable, "-c", KILLED, str(copies), str(whole), call]
    done = subprocess.run(command, capture_output=True, text=True)
    *killed, ended = map(int, done.stdout.split())
    assert (done.returncode, ended) == (0, 0) and set(killed) == {-signal.SIGKILL}, done
    count = len(killed)
    assert count >= {"fsync": 15, "rename": 5, "mkdir": 3, "unlink": 5, "rmdir": 2}[call]
    for number in range(1, count + 1):
        parent = copies / str(number)
        clean_leftovers(parent)
        assert not list(parent.glob("*.tmp"))
        folders = newest_complete(parent)
        assert folders and set(folders) == set(parent.iterdir())
        for folder in folders:
            verify_folder(folder)
            assert folder.name == "step-1" or (folder / "tokenizer.json").read_text() == "the same for all"
        write(parent, 9)  # and the next run goes on
        assert first_intact(numbered(parent)) == (parent / "step-9", [])


def test_manifest_has_sizes_and_hashes_of_all_files(tmp_path):
    with CommitFolder(tmp_path, "step-1") as folder:
        folder.add("a.bin", b"xyz" * 7)
        folder.add_json("b.json", {"key": "größer"})
        folder.add("c.txt", b"")
        assert folder.path == tmp_path / "step-1.tmp" and not (tmp_path / "step-1").exists()
    path = tmp_path / "step-1"
    files = json.loads((path / "manifest.json").read_text())["files"]
    found = {file.name: file.stat().st_size for file in path.iterdir()}
    assert {name: entry["size"] for name, entry in files.items()} == {
        n: s for n, s in found.items() if n != "manifest.json"
    }
    assert json.loads((path / "b.json").read_text()) == {"key": "größer"}
    verify_folder(path)


def test_everything_is_synced_before_its_name_is_final(tmp_path, monkeypatch):
    log = []
    real_sync, real_rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (log.append(os.readlink(f"/proc/self/fd/{fd}")), real_sync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (log.append((str(a), str(b))), real_rename(a, b)))
    write(tmp_path, 1, b=b"more")
    work, final = str(tmp_path / "step-1.tmp"), str(tmp_path / "step-1")
    assert log == [f"{work}/a.bin", f"{work}/b.bin", f"{work}/manifest.json", work, (work, final), str(tmp_path)]


@pytest.mark.parametrize("position", [0, 500, 999])
def test_a_flipped_bit_is_found_and_the_older_folder_taken(tmp_path, position):
    write(tmp_path, 1)
    newest = write(tmp_path, 2, b=b"x" * 10)
    data = bytearray((newest / "a.bin").read_bytes())
    data[position] ^= 0x10
    (newest / "a.bin").write_bytes(data)
    with pytest.raises(CorruptData, match=r"step-2/a\.bin differs"):
        verify_folder(newest)
    found, problems = first_intact(numbered(tmp_path))
    assert found == tmp_path / "step-1" and len(problems) == 1 and "a.bin" in str(problems[0])


@pytest.mark.parametrize(
    "damage, word",
    [
        (lambda path: (path / "a.bin").unlink(), r"a\.bin is missing"),
        (lambda path: os.truncate(path / "a.bin", 999), r"a\.bin has 999 bytes, written were 1000"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text('{"files": []}'), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").unlink(), "never committed"),
    ],
)
def test_damage_is_named(tmp_path, damage, word):
    path = write(tmp_path, 1)
    damage(path)
    with pytest.raises(CorruptData, match=word):
        verify_folder(path)
    assert first_intact(numbered(tmp_path))[0] is None


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    path = write(tmp_path, 1)
    manifest = path / "manifest.json"
    good = manifest.read_bytes()
    facts = json.loads(good)["files"]
    unnoticed = 0
    for index in range(len(good)):
        data = bytearray(good)
        data[index] ^= 0x01
        manifest.write_bytes(data)
        try:
            verify_folder(path)
        except CorruptData:
            continue
        unnoticed += 1
        assert json.loads(data)["files"] == facts, data  # unnoticed only where it says nothing about the files
    assert unnoticed < 20


def test_newest_is_by_number_and_needs_a_manifest(tmp_path):
    for number in (9, 100, 20):
        write(tmp_path, number)
    (tmp_path / "step-500").mkdir()
    (tmp_path / "step-x").mkdir()
    assert [path.name for path in newest_complete(tmp_path)] == ["step-100", "step-20", "step-9"]
    prune(tmp_path, 2)
    assert [path.name for path in newest_complete(tmp_path)] == ["step-100", "step-20"]
    assert newest_complete(tmp_path / "gone") == [] and first_intact(numbered(tmp_path / "gone")) == (None, [])


def test_an_exception_abandons(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(KeyError), CommitFolder(tmp_path, "step-2") as folder:
        folder.add("a.bin", b"1")
        raise KeyError("stop")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_half_a_file_is_not_committed_by_who_catches_the_error(tmp_path):
    with CommitFolder(tmp_path, "step-1") as folder:
        with pytest.raises(ZeroDivisionError), folder.open("half.bin") as file:
            file.write(b"12")
            raise ZeroDivisionError
        folder.add("whole.bin", b"1234")
    assert not (tmp_path / "step-1" / "half.bin").exists()


def test_the_same_name_is_replaced(tmp_path):
    write(tmp_path, 1, b=b"old")
    path = write(tmp_path, 1)
    verify_folder(path)
    assert sorted(file.name for file in path.iterdir()) == ["a.bin", "manifest.json"]
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_go_and_work_in_progress_stays(tmp_path):
    (tmp_path / "step-7.tmp" / "deep").mkdir(parents=True)
    (tmp_path / "step-7.tmp" / "deep" / "x").write_text("left by a kill")
    with CommitFolder(tmp_path, "step-8") as folder:
        assert not (tmp_path / "step-7.tmp").exists()
        other = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; from pathlib import Path; from vblackwell.folders.commit import *\n"
                "clean_leftovers(Path(sys.argv[1]))\n"
                "try: CommitFolder(Path(sys.argv[1]), 'step-8').__enter__()\n"
                "except DiskError as error: print(error)",
                str(tmp_path),
            ],
            capture_output=True,
            text=True,
        )
        assert "written by another process" in other.stdout and folder.path.is_dir(), other
    assert newest_complete(tmp_path) == [tmp_path / "step-8"]


def test_what_others_left_next_to_the_folder_stays(tmp_path):
    """Users choose where a folder goes: what is there and ends in .tmp may be theirs."""
    for name in ("notes.tmp", "thesis.replaced.tmp", "step-by-step.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text("mine")
    (tmp_path / "model.tmp").mkdir()  # of a writer of this very folder that is dead
    with CommitFolder(tmp_path, "model") as folder:
        folder.add("a.bin", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model",
        "notes.tmp",
        "step-by-step.tmp",
        "thesis.replaced.tmp",
    ]


def test_what_was_never_committed_is_not_replaced(tmp_path):
    (tmp_path / "model").mkdir()
    with CommitFolder(tmp_path, "model") as folder:  # empty: nobody loses anything
        folder.add("a.bin", b"1")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "text").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("work", "file"):
        with (
            pytest.raises(ConfigurationError, match=f"{name} exists and has no manifest"),
            CommitFolder(tmp_path, name),
        ):
            pytest.fail("began")
    assert (tmp_path / "work" / "text").read_text() == (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_lost_its_manifest_is_passed_over_and_written_again(tmp_path):
    for number in (1, 2):
        write(tmp_path, number)
    (tmp_path / "step-2" / "manifest.json").unlink()
    found, problems = first_intact(numbered(tmp_path))
    assert found == tmp_path / "step-1" and "step-2/manifest.json is missing" in str(problems[0])
    with CommitFolder(tmp_path, "step-2", own_parent=True) as folder:
        folder.add("b.bin", b"again")
    verify_folder(tmp_path / "step-2")
    assert sorted(path.name for path in (tmp_path / "step-2").iterdir()) == ["b.bin", "manifest.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_a_link_stays_and_the_folder_goes_where_it_points(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk" / "model")
    for data in (b"1", b"2"):  # made, and replaced
        with CommitFolder(tmp_path, "model") as folder:
            folder.add("a.bin", data)
        assert (tmp_path / "model").is_symlink() and (tmp_path / "disk/model/a.bin").read_bytes() == data
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.bin", "disk", "manifest.json", "model", "model"]


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO)), DiskError, "renaming"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_rename_that_fails_or_is_interrupted_puts_the_older_folder_back(error, raised, words, tmp_path, monkeypatch):
    older, real = write(tmp_path, 1, b=b"old"), os.rename

    def rename(source, target):
        if str(source).endswith("step-1.tmp"):
            raise error
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(raised, match=words):
        write(tmp_path, 1)
    assert list(tmp_path.iterdir()) == [older] and (older / "b.bin").read_bytes() == b"old"
    verify_folder(older)


FULL = textwrap.dedent("""
    import resource, sys
    from pathlib import Path
    from vblackwell.folders.commit import CommitFolder
    from vblackwell.errors import DiskError
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        with CommitFolder(Path(sys.argv[1]), "step-2") as folder:
            folder.add("small.bin", b"1" * 1000)
            with folder.open("large.bin") as file:
                if sys.argv[2] == "reserve":
                    file.reserve(300_000)
                for _ in range(3):
                    file.write(b"2" * 70_000)
    except DiskError as error:
        print(error)
""")


@pytest.mark.parametrize("way, offset", [("write", 70_000), ("reserve", 0)])
def test_a_full_disk_costs_nothing(tmp_path, way, offset):
    """RLIMIT_FSIZE: a real refusal by the kernel in the middle of a write."""
    older = write(tmp_path, 1)
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path), way], capture_output=True, text=True)
    assert f"at offset {offset} of {tmp_path}/step-2.tmp/large.bin" in done.stdout, done
    assert "no room for" in done.stdout and "are free" in done.stdout and "make room" in done.stdout
    assert list(tmp_path.iterdir()) == [older]
    verify_folder(older)


def test_a_size_stated_beforehand_is_refused_before_anything_is_written(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(DiskError, match=r"needs .* are free"), CommitFolder(tmp_path, "step-1", needed_bytes=4 * free):
        pytest.fail("began")
    assert not list(tmp_path.iterdir())


def test_a_failed_sync_abandons(tmp_path, monkeypatch):
    older = write(tmp_path, 1)

    def refuse(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(commit.os, "fsync", refuse)
    with pytest.raises(DiskError, match=r"syncing .*a\.bin failed: Input/output error"):
        write(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [older]


def test_permissions_are_the_umasks(tmp_path):
    before = os.umask(0o027)
    try:
        path = write(tmp_path, 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(DiskError, match="locked"):
        write(tmp_path / "locked", 1)


def test_limits_are_left_alone():
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
