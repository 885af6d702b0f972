"""A CUDA stream whose kernels run on some of a GPU's multiprocessors: another card's number, on this one.

By the driver: a torch.cuda.green_contexts.GreenContext that is entered makes the default stream current, in which no
graph can be captured. Memory keeps all of its rate, and clocks are this GPU's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vblackwell.errors import Unsupported
from vblackwell.kernels.runtime.launch import check_driver, waiting_driver

_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM, _NON_BLOCKING = 1, 1  # CU_GREEN_CTX_DEFAULT_STREAM, CU_STREAM_NON_BLOCKING
_SM_COUNT_AT = 96  # bytes into a CUdevResource, after its type and the driver's own


class _Resource(ctypes.Structure):
    """CUdevResource, and more bytes than any release of the driver writes."""

    _fields_ = [("bytes", ctypes.c_ubyte * 256)]


@contextmanager
def green_stream(processors: int) -> Iterator[tuple[torch.cuda.Stream, int]]:
    """(A stream on ``processors`` multiprocessors of the current GPU or a few more, how many they are); current inside.
    Raises Unsupported where the driver cannot set so many apart."""
    device, driver = torch.cuda.current_device(), waiting_driver()
    torch.cuda.synchronize()
    every, group, rest = _Resource(), _Resource(), _Resource()
    count, described = ctypes.c_uint(1), ctypes.c_void_p()
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    at = ctypes.byref
    calls = (
        ("cuDeviceGetDevResource", device, at(every), _SM),
        ("cuDevSmResourceSplitByCount", at(group), at(count), at(every), at(rest), 0, processors),
        ("cuDevResourceGenerateDesc", at(described), at(group), 1),
        ("cuGreenCtxCreate", at(context), described, device, _DEFAULT_STREAM),
        ("cuGreenCtxStreamCreate", at(stream), context, _NON_BLOCKING, 0),
    )
    for name, *args in calls:  # a handle is read when its call's turn comes
        if not hasattr(driver, name):
            raise Unsupported(f"this driver has no {name}: green contexts need CUDA 12.5 or later")
        check_driver(getattr(driver, name)(*args), f"{name} for {processors} multiprocessors")
    found = ctypes.c_uint.from_buffer(group, _SM_COUNT_AT).value
    external = torch.cuda.ExternalStream(stream.value or 0)
    try:
        with torch.cuda.stream(external):
            yield external, found
    finally:
        torch.cuda.synchronize()
        check_driver(driver.cuStreamDestroy_v2(stream), "ending a stream")
        check_driver(driver.cuGreenCtxDestroy(context), "ending a green context")
