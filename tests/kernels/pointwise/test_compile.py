"""Every fused kernel compiles for its GPUs without one, in bf16 and at the sizes that need most: registers without
spills, shared memory.

In a separate process, because where there is no GPU this one has Triton's interpreter on, which compiles nothing.
"""

from __future__ import annotations

import json

import pytest

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

PROGRAM = """
import itertools, json, pathlib, re, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vblackwell.kernels.pointwise import rows_triton
from vblackwell.kernels.attention import decode_triton as decode_attention_triton, paged_triton
from vblackwell.kernels.attention.plan import AttentionPlan
from vblackwell.kernels.fp4 import encode_triton, tile_triton
from vblackwell.kernels.pointwise import sampling_triton
from vblackwell.numerics.formats import FORMATS

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
    plan = AttentionPlan(64, 64, 4, 3)
    how = paged_triton.How(True, 8, 64)
    form = paged_triton.form_of(plan, how, 4, 128, 0, True, False, "tf32")
    yield paged_triton._merge_chunks, {"FORM": form, "HOW": how}, 1
    yield paged_triton._store_rows, {"K": 8, "H": 128, "SIZE": (8, 128)}, 4
    yield sampling_triton._least_key, {"WORDS": 128256, "LANES": sampling_triton.CUT_LANES}, sampling_triton.CUT_WARPS
    for name, search, out in PACKING:
        width = min(encode_triton.LANES, FORMATS[name].block_size or 4096)
        levels, blocks = width.bit_length() - 1, encode_triton.ELEMENTS // width
        by = encode_triton.Packing(name, search, levels, blocks, out == "limited")
        yield encode_triton._encode, {
            "BY": by, "MAXIMA": encode_triton.MAXIMA,
            **dict.fromkeys({"codes_ptr", "scales_ptr", "fine_ptr", "values_ptr"} - OUT.get(out, OUT["codes"])),
            **({} if name == "int8" else {"chunks": 1})}, 4
    yield encode_triton._maxima, {"BLOCK": encode_triton.MAXIMA_BLOCK}, 8
    for mx, fine in ((False, False), (True, False), (False, True)):
        yield tile_triton._words, {"BLOCK": tile_triton.TILE_BLOCK, "MX": mx, "FINE": fine}, 4
    for mx in (False, True):
        yield tile_triton._scales, {"BLOCK": tile_triton.TILE_BLOCK, "MX": mx}, 4
    yield tile_triton._untile, {"BLOCK": tile_triton.TILE_BLOCK}, 4
    yield encode_triton._encode_rows, {"BLOCKS": encode_triton.ELEMENTS // 16, "MAXIMA": encode_triton.MAXIMA}, 4

OUT = {"codes": {"codes_ptr", "scales_ptr"}, "parts": {"codes_ptr", "scales_ptr", "fine_ptr"}, "values": {"values_ptr"}}
PACKING = (*itertools.product(FORMATS, ("mse", "max"), ("codes",)), *((name, "max", "values") for name in FORMATS),
    ("nvfp4", "mse", "parts"), ("nvfp4", "mse", "limited"))

FP32 = ("scale_ptr", "partial_ptr", "loss_ptr", "factor_ptr", "cos_ptr", "sin_ptr", "tensor_scale_ptr", "sum_ptr",
    "top_ptr", "mass_ptr", "temperature_ptr")
STRIDES = {  # of each tensor a tuple
    "_rotate": (("i32",) * 3,) * 4 + (("i32",) * 2,) * 2,
    "_store": (("i32",) * 2,) * 3 + (("i32",) * 3,),
    "_attend": ("i32",) * 3,
    "_merge_chunks": ("i32",) * 2,
    "_store_rows": (("i32",) * 2,) * 2 + (("i32",) * 3,),
}
def type_of(name, kernel, values):
    if kernel in ("_words", "_scales") and name == "codes_ptr" or kernel == "_maxima" and name == "out_ptr":
        return "*i32"
    if kernel in ("_words", "_untile") and name in ("words_ptr", "out_ptr"):
        return "*i32"
    if kernel == "_scales" and name == "out_ptr":
        return "*u8"
    if name in ("target_ptr", "position_ptr", "slots_ptr"):
        return "*i64"
    if name in ("maxima_ptr", "starts_ptr", "lengths_ptr"):
        return "*i32"
    if name == "parts":
        return ("*fp32",) * 3
    if name == "numbers":
        return "i32", "fp32", "fp32"
    if name in ("scales_ptr", "codes_ptr", "fine_ptr", "e5m3_ptr"):
        return "*u8"
    if name == "unit_ptr":
        return "*i32" if values and kernel == "_encode" else "*fp32"
    if name == "least_ptr":
        return "*i32"
    if name == "cuts":
        return "*i32", "*fp32", "*fp32"
    if name == "shape":
        return ("i32",) * (4 if kernel.startswith("_encode") else 2 if kernel == "_untile" else 3)
    if name == "strides":
        return STRIDES[kernel]
    if name.endswith("_ptr"):
        return "*fp32" if name in FP32 else "*bf16"
    return "fp32" if name in ("eps", "scale") else "i32"

found = []
every = [(capability, *case) for capability in json.loads(sys.argv[1]) for case in cases(capability)]
for capability, kernel, constants, warps in every[::int(sys.argv[3])]:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name, kernel.__name__, "codes_ptr" in constants)
        for name in names}
    source = ASTSource(kernel, signature, constexprs={(names.index(name),): v for name, v in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": not kernel.__name__.startswith("_encode")})
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
    [([90], 14), pytest.param([80, 86, 89, 90, 100, 120], 1, marks=pytest.mark.slow)],
    ids=str,
)
def test_kernels_fit(capabilities, stride, program, tmp_path):
    """Norms, decoding, packing and tiles for one; all for all, of which 86 has the least shared memory, if slow."""
    words = [json.dumps(capabilities), str(tmp_path / "kernel.cubin"), str(stride)]
    found = json.loads(program(PROGRAM, *words, TRITON_CACHE_DIR=str(tmp_path)).splitlines()[-1])
    assert len(found) == len(range(0, 44 * len(capabilities), stride))
    for capability, kernel, shared_bytes, local_bytes in found:
        called = 32 if kernel.startswith("_encode{") else 0  # fp64 division calls a function, which saves registers
        assert shared_bytes <= SHARED_BYTES[capability] and local_bytes <= called, (kernel, shared_bytes, local_bytes)
