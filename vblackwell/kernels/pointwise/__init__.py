"""Row-wise operators: norms, gating, rotary positions, the loss, sampling."""
