"""Stacks as the offload tests have them."""

from tests.offload.conftest import make_stack, one_thread  # noqa: F401 - fixtures
