"""Every fused kernel compiles for its GPUs without one, in bf16 and at the sizes that need most: registers without
spills, shared memory.

In a separate process, because where there is no GPU this one has Triton's interpreter on, which compiles nothing.
"""

from __future__ import annotations

import json

import pytest

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

PROGRAM = """
import json, pathlib, re, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vblackwell.kernels.pointwise import rows_triton
from vblackwell.kernels.attention import decode_triton as decode_attention_triton
from vblackwell.kernels.fp4 import encode_triton
from vblackwell.kernels.pointwise import sampling_triton

def rms(width, stages):
    rows, block, warps = rows_triton.tile_of(width)
    return {"TILE": rows_triton.Tile(width, rows, block, 64, stages)}, warps

def cases(capability):
    shared = (224 if capability in (90, 100) else 96) << 10
    for width in (128, 2560, 8192):
        yield rows_triton._rms_norm, *rms(width, rows_triton.forward_stages(width, 2, 2, True, shared))
        shape, warps = rms(width, rows_triton.backward_stages(width, 2, True, shared))
        yield rows_triton._rms_norm_backward, shape, warps if shape["TILE"].block <= 4096 else 32
    # The weight of this one comes through shared memory, too.
    shape, warps = rms(16384, rows_triton.forward_stages(16384, 2, 2, False, shared))
    yield rows_triton._rms_norm, {**shape, "residual_ptr": None}, warps
    yield rows_triton._sum, {"D": 2560, "ROWS": 512, "COLUMNS": rows_triton.SUM_COLUMNS}, 4
    yield rows_triton._swiglu, {"BLOCK": rows_triton.SWIGLU_BLOCK}, rows_triton.SWIGLU_WARPS
    yield rows_triton._swiglu_backward, {"BLOCK": rows_triton.SWIGLU_BLOCK}, rows_triton.SWIGLU_WARPS
    yield rows_triton._rotate, {"BY": rows_triton.Rotation(32, 8, 64, 64, 32, True)}, 4
    yield rows_triton._loss_and_gradient, {
        "WORDS": 128256, "GRADIENTS": True, "BLOCK": rows_triton.LOSS_BLOCK}, rows_triton.LOSS_WARPS
    yield rows_triton._scale, {"BLOCK": 2048}, 4
    yield rows_triton._store, {"BY": rows_triton.Rotation(32, 8, 64, 64, 1, False)}, 1
    size = decode_attention_triton.Size(8, 4, 256, 256, 9, decode_attention_triton.KEYS[2])
    yield decode_attention_triton._attend, {"SIZE": size}, 4
    yield decode_attention_triton._join, {"H": 128, "WIDE": 128, "PARTS": 9, "MANY": 16}, 2
    yield sampling_triton._least_key, {"WORDS": 128256, "LANES": sampling_triton.CUT_LANES}, sampling_triton.CUT_WARPS
    yield encode_triton._encode, {"BLOCKS": encode_triton.BLOCKS}, 4
    yield encode_triton._words, {"BLOCK": encode_triton.TILE_BLOCK}, 4
    yield encode_triton._scales, {"BLOCK": encode_triton.TILE_BLOCK}, 4

FP32 = ("scale_ptr", "partial_ptr", "loss_ptr", "factor_ptr", "cos_ptr", "sin_ptr", "tensor_scale_ptr", "sum_ptr",
    "top_ptr", "mass_ptr", "temperature_ptr")
STRIDES = {  # of each tensor a tuple
    "_rotate": (("i32",) * 3,) * 4 + (("i32",) * 2,) * 2,
    "_store": (("i32",) * 2,) * 3 + (("i32",) * 3,),
    "_attend": ("i32",) * 3,
}
def type_of(name, kernel):
    if kernel == "_words" and name in ("codes_ptr", "out_ptr"):
        return "*i32"
    if kernel == "_scales" and name == "out_ptr":
        return "*u8"
    if name in ("target_ptr", "position_ptr"):
        return "*i64"
    if name in ("scales_ptr", "codes_ptr"):
        return "*u8"
    if name == "unit_ptr":
        return "*fp64"
    if name == "least_ptr":
        return "*i32"
    if name == "cuts":
        return "*i32", "*fp32", "*fp32"
    if name == "strides":
        return STRIDES[kernel]
    if name.endswith("_ptr"):
        return "*fp32" if name in FP32 else "*bf16"
    return "fp32" if name in ("eps", "scale") else "i32"

found = []
every = [(capability, *case) for capability in json.loads(sys.argv[1]) for case in cases(capability)]
for capability, kernel, constants, warps in every[::int(sys.argv[3])]:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name, kernel.__name__) for name in names}
    source = ASTSource(kernel, signature, constexprs={(names.index(name),): v for name, v in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    pathlib.Path(sys.argv[2]).write_bytes(compiled.asm["cubin"])
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [tool, "--dump-resource-usage", sys.argv[2]]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    local = max(int(value) for value in re.findall(r"(?:STACK|LOCAL):(\\d+)", usage))
    found.append([capability, kernel.__name__ + str(constants), compiled.metadata.shared, local])
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("capabilities", "stride"),
    [([90], 3), ([100, 120], 7), pytest.param([80, 86, 89, 90, 100, 120], 1, marks=pytest.mark.slow)],
    ids=str,
)
def test_kernels_fit(capabilities, stride, program, tmp_path):
    """Some for those that a GPU is likely to have; all, and for 86 with the least shared memory, with what is slow."""
    words = [json.dumps(capabilities), str(tmp_path / "kernel.cubin"), str(stride)]
    found = json.loads(program(PROGRAM, *words, TRITON_CACHE_DIR=str(tmp_path)).splitlines()[-1])
    assert len(found) == len(range(0, 20 * len(capabilities), stride))
    for capability, kernel, shared_bytes, local_bytes in found:
        assert shared_bytes <= SHARED_BYTES[capability] and local_bytes == 0, (kernel, shared_bytes, local_bytes)
