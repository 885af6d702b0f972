"""GPUs by name: as people type them, as drivers report them, and what is not one card of the table."""

from __future__ import annotations

import pytest

from vblackwell.errors import ConfigurationError
from vblackwell.machine.gpus import GPUS, find_gpu, known_as
from vblackwell.units import GiB


@pytest.mark.parametrize(
    ("typed", "card"),
    [
        ("4070", "RTX 4070"), ("rtx4070", "RTX 4070"), ("RTX 3060 12GB", "RTX 3060"), ("rtx306012gb", "RTX 3060"),
        ("GeForce RTX 3060", "RTX 3060"), ("NVIDIA GeForce RTX 3090", "RTX 3090"), ("rtx-3090", "RTX 3090"),
        ("NVIDIA H100 80GB HBM3", "H100"), ("h200", "H200"), ("H200 141 GB", "H200"), ("3060 ti", "RTX 3060 Ti"),
        ("3060TI", "RTX 3060 Ti"), ("RTX3060Ti", "RTX 3060 Ti"), ("a100 80", "A100 80GB"), ("a10080gb", "A100 80GB"),
        ("A100-80GB", "A100 80GB"), ("NVIDIA RTX A6000", "A6000"), ("rtxa6000", "A6000"), ("l40s", "L40S"),
        ("rtx 4060 ti 16 gb", "RTX 4060 Ti 16GB"), ("rtx4070super", "RTX 4070 Super"), ("T4", "T4"), ("l4", "L4"),
    ],
)  # fmt: skip
def test_what_people_type(typed, card):
    assert find_gpu(typed).name == card and known_as(typed) is find_gpu(typed)


def test_every_name_of_the_table_is_its_own():
    for name, gpu in GPUS.items():
        assert find_gpu(name) is find_gpu(name.lower()) is find_gpu(f"NVIDIA {name.upper()}") is gpu
    assert find_gpu("RTX 3090").total_bytes == 24 * GiB and find_gpu("RTX 5090").capability == (12, 0)
    assert find_gpu("H200").total_bytes == 141 * 10**9


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("a100", "sold with different memory: give 'A100 40GB' or 'A100 80GB'$"),
        ("4060ti", "give 'RTX 4060 Ti 8GB' or 'RTX 4060 Ti 16GB'$"),
        ("RTX 3060 8GB", "the table has this card with 12 GB: give 'RTX 3060', or --gpu-memory of another$"),
        ("A100 64GB", "with 40 GB or 80 GB: give 'A100 40GB' or 'A100 80GB'"),
        ("4090ti", "not in the table; the nearest: 'RTX 4090',"),
        ("RTX 3091", "not in the table; the nearest: 'RTX 3090',"),
        ("RTX 4090 Laptop", "not in the table; the nearest: 'RTX 4090',"),  # another chip under the same number
        ("", "GPU '' is not in the table"),
    ],
)
def test_what_is_not_one_card(typed, said):
    with pytest.raises(ConfigurationError, match=said) as refused:
        find_gpu(typed)
    assert known_as(typed) is None
    text = str(refused.value)
    named = [name for name in GPUS if f"'{name}'" in text]
    assert len(named) <= 3 and ("the nearest" not in text or (len(named) == 3 and "vb estimate --list" in text))
