"""Compiles attention kernels for GPUs that are not there, and says what they need: ``python -m tests.kernels.attention_compile 90``.

A process of its own: Triton's interpreter must be off. Arguments: compute capability, and cases as ``kernel,head,mask`` or
``kernel,head,mask,fp32``, the kernel being forward, dq, dkv or, on 90, specialized. Default: every one of the first three by head width
and kind of mask, which takes minutes. Prints a line of JSON a case: name, shared bytes, spilled bytes of a thread.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
MASKS = ("none", "boolean", "additive")


def build(kernel_name: str, head: int, mask: str, dtype: str, capability: int, **features: Any) -> tuple[str, int, int]:
    """(plan, shared bytes, spilled bytes a thread) of a causal kernel as it ships."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vblackwell.kernels.attention_backward import key_gradient, query_gradient
    from vblackwell.kernels.attention_forward import attend
    from vblackwell.kernels.attention_plan import padded_head, plan_for

    kernel = {"forward": attend, "dq": query_gradient, "dkv": key_gradient}[kernel_name]
    plan = plan_for(kernel_name, head, 4 if dtype == "fp32" else 2, SHARED_BYTES[capability], mask != "none")
    width = padded_head(head)
    constants: dict[str, Any] = {
        "GROUP": 1, "MASK": MASKS.index(mask), "HAS_LEFT": False, "HAS_RIGHT": True, "BOTTOM_RIGHT": False, "SOFTCAP": False,
        "ALIBI": False, "DROPOUT": False, "VARLEN": False, "EVEN": True, "H": head, "D": width, "ROWS": plan.rows,
        "COLUMNS": plan.columns, "PRECISION": "ieee" if dtype == "fp32" else "tf32", "TMA": plan.tma, **features,
    }  # fmt: skip
    if mask != "none":
        constants["stride_mask_col"] = 1
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    tiled = {"q_ptr": plan.rows, "dout_ptr": plan.rows, "k_ptr": plan.columns, "v_ptr": plan.columns}

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in tiled and constants["TMA"]:
            return f"tensordesc<{dtype}[1, 1, {tiled[name]}, {width}]>"
        if name.endswith("_ptr"):
            special = {
                "lse": "*fp32",
                "delta": "*fp32",
                "slope": "*fp32",
                "seed": "*i64",
                "mask": "*u8" if mask == "boolean" else f"*{dtype}",
            }
            whole = ("items", "counts", "q_starts", "k_starts")
            stem = name.removesuffix("_ptr")
            return "*i32" if stem in whole else special.get(stem, f"*{dtype}")
        return "fp32" if name in ("scale", "softcap", "dropout") else "i32"

    signature = {name: type_of(name) for name in kernel.arg_names}
    # as launches find them: aligned pointers and strides
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.startswith("stride_") and signature[name] == "i32"
    }
    source = ASTSource(
        kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()}, attrs=aligned
    )
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return str(plan), compiled.metadata.shared, spilled_bytes(compiled.asm["cubin"])


def build_specialized(head: int) -> tuple[str, int, int]:
    """The same of attention_hopper.py's forward, causal, for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from vblackwell.kernels.attention_hopper import attend_hopper
    from vblackwell.kernels.attention_plan import SPECIALIZED, padded_head

    width = padded_head(head)
    plan, names = SPECIALIZED[width], attend_hopper.arg_names
    constants: dict[str, Any] = {
        "GROUP": 1, "HAS_RIGHT": True, "BOTTOM_RIGHT": False, "H": head, "D": width, "ROWS": plan.rows // 2,
        "COLUMNS": plan.columns, "STAGES": plan.stages,
    }  # fmt: skip
    signature = {name: "constexpr" if name in constants else "i32" for name in names}
    signature |= {"out_ptr": "*bf16", "lse_ptr": "*fp32", "scale": "fp32"}
    for name, rows in (("q", plan.rows // 2), ("k", plan.columns), ("v", plan.columns)):
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], gl.bfloat16)
        signature[name] = f"tensordesc<bf16[1, 1, {rows}, {width}],{layout!r}>"
    source = GluonASTSource(
        attend_hopper, signature, constexprs={(names.index(k),): v for k, v in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr") or name.startswith("stride_")},
    )  # fmt: skip
    options = {"num_warps": plan.warps, "maxnreg": plan.registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(plan), compiled.metadata.shared, spilled_bytes(compiled.asm["cubin"])


def spilled_bytes(cubin: bytes) -> int:
    """Bytes of local memory that a thread uses."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return max(int(value) for value in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


def main() -> None:
    capability, cases = int(sys.argv[1]), [word.split(",") for word in sys.argv[2:]]
    everything = [
        (kernel, head, mask, dtype)
        for dtype in ("bf16", "fp32") for head in (64, 128, 256) for kernel in ("forward", "dq", "dkv") for mask in MASKS
    ]  # fmt: skip
    for kernel, head, mask, *dtype in cases or everything:
        dtype = dtype[0] if dtype else "bf16"
        special = kernel == "specialized"
        plan, shared, local = (
            build_specialized(int(head)) if special else build(kernel, int(head), mask, dtype, capability)
        )
        print(json.dumps([f"sm_{capability} {kernel} {head} {mask} {dtype} {plan}", shared, local]), flush=True)


if __name__ == "__main__":
    main()
