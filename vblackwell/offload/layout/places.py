"""Where AdamW runs, by name. Reading a flag asks too, and must not import torch."""

PLACES = ("auto", "device", "host")
OLD_PLACES: dict[str | float, str] = {"level0": "device", "home": "host"}  # older names, which are taken as well
