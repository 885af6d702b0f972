"""Compiles attention kernels for GPUs that are not there, and says what they need:
``python -m tests.kernels.attention.compile 90``.

A separate process: Triton's interpreter must be off. Arguments: compute capability, and cases as
``kernel,head,mask``, with ``,fp32`` or ``,bf16,FEATURE`` (of `FEATURES`) after it, the kernel being forward, dq, dkv
or, on 90, specialized; or steps or prompts, which take keys in pages, of 16 for the feature small. After those
``,128x64x8x2`` or ``,128x64x8x2x128`` for another plan than the shipped one (rows, columns, warps, stages, most
registers). Default: every one of
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
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
MASKS = ("none", "boolean", "additive")
# What else launches may ask for, and how the kernels are told; all but the first four take the tiles of masked
# attention.
FEATURES: dict[str, dict[str, Any]] = {
    "whole": {"has_right": False},
    "window": {"has_left": True, "even": False},
    "packed": {"varlen": True, "even": False, "tma": False, "aligned_lengths": False},
    "strided": {"even": False, "tma": False, "aligned_lengths": False},
    "dropout": {"dropout": True, "even": False},
    "softcap": {"softcap": True, "even": False},
    "alibi": {"alibi": True, "even": False},
    "broadcast": {"ends": True, "even": False},
}
FEATURES["all"] = {
    **FEATURES["dropout"],
    "softcap": True,
    "alibi": True,
    "has_left": True,
    "bottom_right": True,
    "group": 4,
}
FEATURES["small"] = {"page": 16}
SCORED = ("dropout", "softcap", "alibi", "all")


def build(
    kernel_name: str,
    head: int,
    mask: str,
    dtype: str,
    capability: int,
    scored: bool = False,
    aligned_lengths: bool = True,
    plan: Any = None,
    **features: Any,
) -> tuple[str, int, int, int, Loops]:
    """(plan, shared bytes, spilled bytes and registers a thread, loops) of a causal kernel as it ships."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vblackwell.kernels.attention.backward import key_gradient, query_gradient
    from vblackwell.kernels.attention.device import Given, Numbers
    from vblackwell.kernels.attention.forward import attend
    from vblackwell.kernels.attention.plan import plan_for

    kernel = {"forward": attend, "dq": query_gradient, "dkv": key_gradient}[kernel_name]
    plan = plan or plan_for(
        kernel_name, head, 4 if dtype == "fp32" else 2, SHARED_BYTES[capability], "scored" if scored else mask
    )
    form = form_of(head, mask, plan, "ieee" if dtype == "fp32" else "tf32", plan.tma)
    form = form._replace(**{"even": kernel_name != "dkv", **features})
    tiled = {"q_ptr": plan.rows, "dout_ptr": plan.rows, "k_ptr": plan.columns, "v_ptr": plan.columns}
    signature: dict[str, Any] = {name: f"*{dtype}" for name in kernel.arg_names if name.endswith("_ptr")}
    tensors = len(signature) - (kernel_name == "forward")  # of the log-sum-exps there are others
    signature |= {"lse_ptr": "*fp32", "sums": ("*fp32",) * 3, "FORM": "constexpr"}
    if form.tma:
        signature |= {name: f"tensordesc<{dtype}[1, 1, {rows}, {form.width}]>" for name, rows in tiled.items()}
    signature |= dict.fromkeys(("list_batch", "list_head", "list_width"), "i32")
    side = (2 if mask == "boolean" else 3) if mask != "none" else None  # the mask's lines, or columns, lie side by side
    signature["given"] = Given(
        "*i64" if mask == "boolean" else f"*{dtype}",
        *("*i32", "*i32", "*i32", "*fp32", "*i64", "*i32", "*i32"),
        (("i32",) * 3,) * tensors,
        ("i32",) * 2,
        tuple("constexpr" if i == side else "i32" for i in range(4)),
        Numbers("i32", "i32", "i32", "i32", "fp32", "fp32", "fp32"),
    )
    signature = {name: signature[name] for name in kernel.arg_names}
    place = kernel.arg_names.index
    constants: dict[Any, Any] = {(place("FORM"),): form}
    if side is not None:
        constants[place("given"), Given._fields.index("mask_strides"), side] = 1

    # as launches find them: aligned pointers and strides, and, by ``aligned_lengths``, lengths that are multiples of 16
    def paths(value: Any, path: tuple[int, ...]) -> list[tuple[int, ...]]:
        if isinstance(value, tuple):
            return [found for i, each in enumerate(value) for found in paths(each, (*path, i))]
        given = path[0] == place("given")
        number = given and Given._fields[path[1]] == "numbers"
        if value == "i32" and given and (not number or aligned_lengths and path[2] < 2):
            return [path]
        return [path] if value.startswith("*") else []

    aligned = [path for name, value in signature.items() for path in paths(value, (place(name),))]
    attrs = {path: [["tt.divisibility", 16]] for path in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": plan.warps, "num_stages": plan.stages} | (
        {"maxnreg": plan.registers} if plan.registers else {}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return str(plan), compiled.metadata.shared, *usage(compiled.asm["cubin"]), loops(compiled.asm["cubin"])


def form_of(head: int, mask: str, plan: Any, precision: str, tma: bool) -> Any:
    """What a causal kernel is compiled for."""
    from vblackwell.kernels.attention.device import Form
    from vblackwell.kernels.attention.plan import padded_head

    return Form(
        mask=MASKS.index(mask),
        has_left=False,
        has_right=True,
        bottom_right=False,
        softcap=False,
        alibi=False,
        dropout=False,
        varlen=False,
        group=1,
        head=head,
        width=padded_head(head),
        rows=plan.rows,
        columns=plan.columns,
        precision=precision,
        stages=plan.stages,
        tma=tma,
        ends=False,
        even=False,
    )


def build_specialized(
    head: int, mask: str, aligned_lengths: bool = True, plan: Any = None, **features: Any
) -> tuple[str, int, int, int, Loops]:
    """The same of hopper.py's forward for sm_90, in bf16; of ``features`` those that it has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from vblackwell.kernels.attention.hopper import attend_hopper
    from vblackwell.kernels.attention.plan import SPECIALIZED, padded_head

    plan, names = plan or SPECIALIZED[max(64, padded_head(head))], attend_hopper.arg_names
    form = form_of(head, mask, plan, "tf32", True)
    form = form._replace(
        **{name: value for name, value in features.items() if name in ("has_left", "has_right", "ends")}
    )
    signature: dict[str, Any] = dict.fromkeys(names, "i32")
    signature |= {"out_ptr": "*bf16", "lse_ptr": "*fp32", "scale": "fp32", "FORM": "constexpr"}
    signature |= {
        "out_strides": ("i32",) * 3,
        "lse_strides": ("i32",) * 2,
        "mask": "*i64" if mask == "boolean" else "*bf16",
    }
    signature |= dict.fromkeys(("items_ptr", "counts_ptr", "order_ptr"), "*i32" if mask != "none" else "*fp32")
    tiles = [("q", plan.rows // 2, form.width), ("k", plan.columns, form.width), ("v", plan.columns, form.width)]
    for name, rows, columns in [*tiles, ("mask", plan.rows // 2, plan.columns)][: 4 if mask == "additive" else 3]:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], gl.bfloat16)
        signature[name] = f"tensordesc<bf16[1, 1, {rows}, {columns}],{layout!r}>"
    aligned = [(i,) for i, name in enumerate(names) if isinstance(signature[name], str) and signature[name][0] == "*"]
    for name in ("out_strides", "lse_strides"):
        aligned += [(names.index(name), i) for i in range(len(signature[name]))]
    source = GluonASTSource(
        attend_hopper,
        signature,
        constexprs={(names.index("FORM"),): form},
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    options = {"num_warps": plan.warps, "maxnreg": plan.registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(plan), compiled.metadata.shared, *usage(compiled.asm["cubin"]), loops(compiled.asm["cubin"])


def build_paged(
    kernel_name: str, head: int, dtype: str, capability: int, plan: Any = None, page: int = 0, **features: Any
) -> tuple[str, int, int, int, Loops]:
    """The same of paged_triton.py's kernel for single queries, whose chunks go to memory, or for prompts."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vblackwell.kernels.attention.paged_triton import How, _attend, form_of
    from vblackwell.kernels.attention.plan import CHUNK, paged_plans

    steps, names = kernel_name == "steps", _attend.arg_names
    itemsize, precision = (4, "ieee") if dtype == "fp32" else (2, "tf32")
    plan = plan or paged_plans(head, itemsize, SHARED_BYTES[capability])[0 if steps else 1]
    how = How(steps, CHUNK // plan.columns, 64)
    form = form_of(plan, how, 4, head, page, features.get("has_left", False), features.get("softcap", False), precision)
    signature: dict[str, Any] = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    signature |= {"parts": ("*fp32",) * 3, **dict.fromkeys(("starts_ptr", "table_ptr", "lengths_ptr"), "*i32")}
    signature |= {"strides": (("i32",) * 2, ("i32",) * 3, ("i32",) * 2, "i32"), "sizes": ("i32",) * 3}
    signature |= {"numbers": ("i32", "fp32", "fp32"), "FORM": "constexpr", "HOW": "constexpr"}
    places = {name: names.index(name) for name in signature}
    aligned = [(places[name],) for name, kind in signature.items() if kind[0] == "*"]
    aligned += [(places["parts"], i) for i in range(3)]
    aligned += [(places["strides"], i, j) for i, count in enumerate((2, 3, 2)) for j in range(count)]
    source = ASTSource(
        _attend,
        {name: signature[name] for name in names},
        constexprs={(places["FORM"],): form, (places["HOW"],): how},
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
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
    )  # after it come second tries of waits, which jump back
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
    cases += [[kernel, head, "none", "bf16", "small"] for head in heads for kernel in ("steps", "prompts")]
    for feature in FEATURES:
        if feature == "small" or feature == "strided" and capability != 90:
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
        elif kernel in ("steps", "prompts"):
            plan, shared, local, registers, inner = build_paged(kernel, int(head), dtype, capability, **options)
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
