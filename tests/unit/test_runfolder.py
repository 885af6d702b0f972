"""A run's folder: who may use it, and settings that are what was written."""

from __future__ import annotations

import json
import re

import pytest

from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.train.runfolder import SETTINGS, RunFolder, read_stored_config, write_settings


@pytest.mark.parametrize("resume", [False, True])
def test_of_two_runs_on_one_new_folder_one_is_refused(resume, tmp_path):
    """Both find no folder. The second begins when the first has finished: it must not write over what is there."""
    first, second = (RunFolder(tmp_path / "run", resume) for _ in range(2))
    first.create()
    with pytest.raises(ConfigurationError, match="in use by process"):
        second.create()
    write_settings(first, {"seed": 1})
    first.release()
    with pytest.raises(ConfigurationError, match="has come to hold a run"):
        second.create()
    second.release()
    assert read_stored_config(tmp_path / "run") == {"seed": 1}
    RunFolder(tmp_path / "run", resume=True).release()


def test_every_flipped_digit_of_the_settings_is_found(tmp_path):
    folder = RunFolder(tmp_path, resume=False)
    stored = {
        "learning_rate": 0.01,
        "seed": 7,
        "weight_decay": 0.1,
        "beta2": 0.95,
        "max_steps": 200,
        "data": "naïve.txt",
    }
    write_settings(folder, stored)
    folder.release()
    path = tmp_path / SETTINGS
    text = path.read_text(encoding="utf-8")
    assert read_stored_config(tmp_path) == stored
    for digit in re.finditer(r"(?<!xxh)\d", text):
        changed = "1" if digit[0] == "0" else "0"
        path.write_text(text[: digit.start()] + changed + text[digit.end() :], encoding="utf-8")
        with pytest.raises(CorruptData, match=r"settings\.json is "):
            read_stored_config(tmp_path)
    path.write_text(json.dumps(stored), encoding="utf-8")  # of an older version: without a hash
    assert read_stored_config(tmp_path) == stored
