"""Folders on disk: written so that a crash cannot half-write them, read so that damage cannot go unseen."""
