"""Training settings that go with each preset, or with a folder's model, where the user says nothing: sizes of batches, lengths, rates.

Rates fall with width as practice has it (GPT-3's table). `tiny` is meant to be watched: it learns the shape of Python from
the standard library's sources in a few minutes on two CPU cores.
"""

from __future__ import annotations

from typing import Any

# A model that has been trained: a preset's rate would undo that. Adapters begin at zero and bear more.
FINE_TUNING: dict[str, Any] = {"learning_rate": 2e-5}
ADAPTERS: dict[str, Any] = {"learning_rate": 2e-4}

RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "batch_size": 8, "seq_length": 128, "learning_rate": 3e-3, "beta2": 0.99, "max_steps": 600,
        "checkpoint_every": 200, "eval_every": 100,
    },
    "small": {"batch_size": 8, "seq_length": 512, "learning_rate": 1e-3, "epochs": 1.0},
    "medium": {"batch_size": 8, "seq_length": 1024, "learning_rate": 6e-4, "epochs": 1.0},
    "large": {"batch_size": 8, "seq_length": 1024, "learning_rate": 4e-4, "epochs": 1.0},
    "xl": {"batch_size": 8, "seq_length": 2048, "learning_rate": 2e-4, "epochs": 1.0, "checkpoint_every": 500},
    "7b": {"batch_size": 8, "seq_length": 2048, "learning_rate": 1.5e-4, "epochs": 1.0, "checkpoint_every": 500},
}  # fmt: skip
