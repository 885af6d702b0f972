"""Compiles attention kernels for GPUs that are not there, and says what they need:
``python -m tests.kernels.attention.compile 90``.

A process of its own: Triton's interpreter must be off. Arguments: compute capability, and cases as
``kernel,head,mask``, with ``,fp32`` or ``,bf16,FEATURE`` (of `FEATURES`) behind it, the kernel being forward, dq, dkv
or, on 90, specialized; and behind those ``,128x64x8x2`` or ``,128x64x8x2x128`` for another plan than the shipped one
(rows, columns, warps, stages, most registers). Default: every one of
the first three by head width, kind of mask and feature, which takes minutes. Prints a line of JSON a case: name with
registers of a thread, how many programs a multiprocessor holds and, of each loop that has matrix products, instructions
of a warp and waits for products, in the order of the code; shared bytes; spilled bytes of a thread.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

Loops = list[tuple[int, int]]
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
MASKS = ("none", "boolean", "additive")
# What else launches may ask for, and how the kernels are told; all but the first four take the tiles of masked
# attention.
FEATURES: dict[str, dict[str, Any]] = {
    "whole": {"HAS_RIGHT": False},
    "window": {"HAS_LEFT": True, "EVEN": False},
    "packed": {"VARLEN": True, "EVEN": False, "TMA": False, "aligned_lengths": False},
    "strided": {"EVEN": False, "TMA": False, "aligned_lengths": False},
    "dropout": {"DROPOUT": True, "EVEN": False},
    "softcap": {"SOFTCAP": True, "EVEN": False},
    "alibi": {"ALIBI": True, "EVEN": False},
    "broadcast": {"ENDS": True, "EVEN": False},
}
FEATURES["all"] = {
    **FEATURES["dropout"],
    "SOFTCAP": True,
    "ALIBI": True,
    "HAS_LEFT": True,
    "BOTTOM_RIGHT": True,
    "GROUP": 4,
}
SCORED = ("dropout", "softcap", "alibi", "all")


def build(
    kernel_name: str, head: int, mask: str, dtype: str, capability: int, scored: bool = False,
    aligned_lengths: bool = True,
    plan: Any = None, **features: Any,
) -> tuple[str, int, int, int, Loops]:  # fmt: skip
    """(plan, shared bytes, spilled bytes and registers a thread, loops) of a causal kernel as it ships."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vblackwell.kernels.attention.backward import key_gradient, query_gradient
    from vblackwell.kernels.attention.forward import attend
    from vblackwell.kernels.attention.plan import padded_head, plan_for

    kernel = {"forward": attend, "dq": query_gradient, "dkv": key_gradient}[kernel_name]
    plan = plan or plan_for(
        kernel_name, head, 4 if dtype == "fp32" else 2, SHARED_BYTES[capability], "scored" if scored else mask
    )
    width = padded_head(head)
    constants: dict[str, Any] = {
        "GROUP": 1, "MASK": MASKS.index(mask), "HAS_LEFT": False, "HAS_RIGHT": True, "BOTTOM_RIGHT": False,
        "SOFTCAP": False,
        "ALIBI": False, "DROPOUT": False, "VARLEN": False, "EVEN": True, "H": head, "D": width, "ROWS": plan.rows,
        "COLUMNS": plan.columns, "PRECISION": "ieee" if dtype == "fp32" else "tf32", "TMA": plan.tma, "ENDS": False,
        **features,
    }  # fmt: skip
    if mask != "none":
        constants["stride_mask_row" if mask == "boolean" else "stride_mask_col"] = 1
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
                "start": "*fp32",
                "slope": "*fp32",
                "seed": "*i64",
                "mask": "*i64" if mask == "boolean" else f"*{dtype}",
            }
            whole = ("items", "counts", "order", "q_starts", "k_starts")
            stem = name.removesuffix("_ptr")
            return "*i32" if stem in whole else special.get(stem, f"*{dtype}")
        return "fp32" if name in ("scale", "softcap", "dropout") else "i32"

    signature = {name: type_of(name) for name in kernel.arg_names}
    # as launches find them: aligned pointers and strides, and, by ``aligned_lengths``, lengths that are multiples of 16
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
        or (name.startswith("stride_") or aligned_lengths and name in ("q_length", "k_length"))
        and signature[name] == "i32"
    }
    source = ASTSource(
        kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()}, attrs=aligned
    )
    options = {"num_warps": plan.warps, "num_stages": plan.stages} | (
        {"maxnreg": plan.registers} if plan.registers else {}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return str(plan), compiled.metadata.shared, *usage(compiled.asm["cubin"]), loops(compiled.asm["cubin"])


def build_specialized(
    head: int, mask: str, aligned_lengths: bool = True, plan: Any = None, **features: Any
) -> tuple[str, int, int, int, Loops]:
    """The same of attention_hopper.py's forward for sm_90, in bf16; of ``features`` those that it has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from vblackwell.kernels.attention.hopper import NUMBERS, attend_hopper
    from vblackwell.kernels.attention.plan import SPECIALIZED, padded_head

    width = padded_head(head)
    plan, names = plan or SPECIALIZED[max(64, width)], attend_hopper.arg_names
    constants: dict[str, Any] = {
        "GROUP": 1, "MASK": MASKS.index(mask), "HAS_LEFT": False, "HAS_RIGHT": True, "ENDS": False,
        "H": head, "D": width, "ROWS": plan.rows // 2, "COLUMNS": plan.columns, "STAGES": plan.stages,
    }  # fmt: skip
    constants |= {name: value for name, value in features.items() if name in constants}
    signature = {name: "constexpr" if name in constants else "i32" for name in names}
    signature |= {
        "out_ptr": "*bf16",
        "lse_ptr": "*fp32",
        "scale": "fp32",
        "mask": "*i64" if mask == "boolean" else "*bf16",
    }
    signature |= {name: "*i32" if mask != "none" else "*fp32" for name in ("items_ptr", "counts_ptr", "order_ptr")}
    tiles = [("q", plan.rows // 2, width), ("k", plan.columns, width), ("v", plan.columns, width)]
    for name, rows, columns in [*tiles, ("mask", plan.rows // 2, plan.columns)][: 4 if mask == "additive" else 3]:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], gl.bfloat16)
        signature[name] = f"tensordesc<bf16[1, 1, {rows}, {columns}],{layout!r}>"
    aligned = [
        name.endswith("_ptr") or signature[name].startswith("*") or name.startswith("stride_") and name not in NUMBERS
        for name in names
    ]
    source = GluonASTSource(
        attend_hopper, signature, constexprs={(names.index(k),): v for k, v in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, known in enumerate(aligned) if known},
    )  # fmt: skip
    options = {"num_warps": plan.warps, "maxnreg": plan.registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(plan), compiled.metadata.shared, *usage(compiled.asm["cubin"]), loops(compiled.asm["cubin"])


def said_of(cubin: bytes, tool: str, *options: str) -> str:
    """What one of the tools that come with triton says of a kernel."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
        return subprocess.run([path, *options, file.name], check=True, capture_output=True, text=True).stdout


def usage(cubin: bytes) -> tuple[int, int]:
    """Bytes of local memory, and registers, that a thread uses."""
    said = said_of(cubin, "cuobjdump", "--dump-resource-usage")
    local, registers = re.findall(r"(?:STACK|LOCAL):(\d+)", said), re.findall(r"REG:(\d+)", said)
    return max(map(int, local)), max(map(int, registers))


def loops(cubin: bytes) -> Loops:
    """Instructions, and waits for a warp group's products, of each innermost loop that has matrix products, in the
    order of the code.

    Where ptxas puts products one after the other (it says so in a warning that triton drops) there are as many waits as
    products.
    """
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in said_of(cubin, "nvdisasm", "-c").splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
    last = max(
        i for i, words in enumerate(code) if "EXIT" in words
    )  # behind it come second tries of waits, which jump back
    found = []
    for end, words in enumerate(code[:last]):
        target = re.search(r"BRA.*?(\.L_\w+)", words)
        if target and labels.get(target[1], end + 1) <= end:
            found.append((labels[target[1]], end))
    found = [(a, b) for a, b in found if any("MMA" in words for words in code[a : b + 1])]
    inner = [(a, b) for a, b in found if not any((a, b) != (c, d) and a <= c and d <= b for c, d in found)]
    return [(b - a + 1, sum("WARPGROUP.DEPBAR" in words for words in code[a : b + 1])) for a, b in sorted(inner)]


def programs_of(registers: int, warps: int, shared: int, capability: int) -> int:
    """How many programs a multiprocessor holds at a time, by registers (given out in eights) and shared memory (1 KiB
    is the system's).
    """
    return min(
        (1 << 16) // (-(-registers // 8) * 8 * 32 * warps),
        (SHARED_BYTES[capability] + 1024) // 1024 // (-(-shared // 1024) + 1),
    )


def plan_of(sizes: str, capability: int) -> Any:
    """The plan that ``sizes`` means, with the copy engine on Hopper; None for none."""
    from vblackwell.kernels.attention.plan import AttentionPlan

    if not sizes:
        return None
    rows, columns, warps, stages, registers = (*map(int, sizes.split("x")), 0)[:5]
    return AttentionPlan(rows, columns, warps, stages, capability == 90, registers)


def everything(capability: int) -> list[list[str]]:
    """All cases of a class of GPU; TMA can only be refused where there is one."""
    kernels, heads = ("forward", "dq", "dkv"), ("64", "128", "256")
    cases = [[kernel, head, mask, "bf16"] for head in heads for kernel in kernels for mask in MASKS]
    for feature in FEATURES:
        if feature == "strided" and capability != 90:
            continue
        mask = "additive" if feature in ("all", "broadcast") else "none"
        cases += [[kernel, head, mask, "bf16", feature] for head in heads for kernel in kernels]
    cases += [[kernel, head, "none", "bf16"] for head in ("32", "80", "96") for kernel in kernels]
    return cases + [
        [kernel, head, mask, "fp32"] for head in heads for kernel in kernels for mask in ("none", "additive")
    ]


def main() -> None:
    capability, cases = int(sys.argv[1]), [word.split(",") for word in sys.argv[2:]]
    for kernel, head, mask, *others in cases or everything(capability):
        dtype, feature, sizes = (*others, *("bf16", "", "")[len(others) :])
        options = {"scored": feature in SCORED, **FEATURES.get(feature, {}), "plan": plan_of(sizes, capability)}
        if kernel == "specialized":
            plan, shared, local, registers, inner = build_specialized(int(head), mask, **options)
        else:
            plan, shared, local, registers, inner = build(kernel, int(head), mask, dtype, capability, **options)
        warps = int(re.findall(r"warps=(\d+)", plan)[0])
        programs = 0 if kernel == "specialized" else programs_of(registers, warps, shared, capability)
        words = (
            f"sm_{capability}",
            kernel,
            head,
            mask,
            dtype,
            feature,
            plan,
            f"{registers} registers",
            f"{programs} programs",
            f"loops {inner}",
        )
        name = " ".join(word for word in words if word and not word.startswith("0 "))
        print(json.dumps([name, shared, local]), flush=True)


if __name__ == "__main__":
    main()
