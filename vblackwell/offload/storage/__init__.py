"""Where a group's bytes live below level 0."""
