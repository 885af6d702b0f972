"""What was measured is found again on the machine that measured it, and a damaged file is no error."""

import pytest
import torch

from vblackwell.kernels.runtime import tuning

GPU = torch.device("cuda", 0)
MACHINE = {"gpu": "NVIDIA H200", "multiprocessors": "132", "driver": "13000", "torch": "2.11", "triton": "3.6"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "machine", lambda device: MACHINE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tuning.entries.cache_clear()
    yield tmp_path
    tuning.entries.cache_clear()


def test_what_was_stored_is_found_again_before_what_was_shipped(monkeypatch, own_cache):
    monkeypatch.setattr(tuning, "SHIPPED", own_cache)
    tuning.store("kind", GPU, {"a": {"us": 1}, "b": {"us": 2}}, tuning.shipped_path("kind", GPU))
    assert tuning.entries("kind", GPU) == {"a": {"us": 1}, "b": {"us": 2}}
    tuning.store("kind", GPU, {"a": {"us": 3}})
    assert tuning.entries("kind", GPU) == {"a": {"us": 3}, "b": {"us": 2}}
    assert tuning.entries("other", GPU) == tuning.entries("kind", torch.device("cpu")) == {}


def test_another_driver_has_another_file():
    assert tuning.cache_path("kind", MACHINE) != tuning.cache_path("kind", {**MACHINE, "driver": "13010"})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"version": 2, "entries": {"a": {"stages": 3}}}',
        "[]",
        '{"version": 1}',
        '{"version": 1, "entries": ["a"]}',
    ],
)
def test_torn_and_foreign_files_are_ignored(own_cache, content):
    path = own_cache / "file.json"
    path.write_text(content)
    assert tuning.read_entries(path) == {}
    tuning.store("kind", GPU, {"a": {"stages": 3}}, path)
    assert tuning.read_entries(path) == {"a": {"stages": 3}}


def test_a_cache_that_cannot_be_written_is_no_error(own_cache):
    (own_cache / "file").write_text("")
    tuning.store("kind", GPU, {"a": {"stages": 3}}, own_cache / "file" / "below.json")
