"""Arithmetic on sizes: groups, formats, pieces, order, placement, forecast. Touches no tensor."""
