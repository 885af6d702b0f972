"""From a run's settings and a machine to a plan with its reasons: what fits, how fast it is, and what to change."""
