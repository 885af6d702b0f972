"""``vb estimate``: the question, its answer, and the ways in which the answer is shown."""
