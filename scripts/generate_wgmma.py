"""Write csrc/sm90/wgmma.cuh: a C++ function per wgmma shape, which takes its accumulator as an array.

python scripts/generate_wgmma.py [--check]

The instruction names every register of its accumulator, so its text depends on the shape, and no template can
spell that.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent.parent / "csrc" / "sm90" / "wgmma.cuh"
COLUMNS = (32, 64, 80, 96, 112, 128, 192, 256)
TYPES = {"__nv_bfloat16": "bf16", "__half": "f16"}

HEAD = """// Written by scripts/generate_wgmma.py; edit that.
//
// D[64 x kN] (+)= A[64 x 16] * B[16 x kN] by one warpgroup, fp32 accumulators: warp w of the four holds rows
// 16w .. 16w + 15 as m16n8 fragments, d[4 * n ..] being columns 8n .. 8n + 7. A comes from shared memory (a
// descriptor) or from registers (an m16k16 fragment), B from shared memory; with kBTransposed its columns
// are contiguous there, not its depth, and with kATransposed so are A's rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashmask::sm90 {

template <typename Element, int kN, bool kBTransposed, bool kATransposed = false>
struct Wgmma;
"""


def function(name: str, columns: int, kind: str) -> str:
    """One of the two forms of a shape: A from a descriptor (``ss``) or from registers (``rs``)."""
    count = columns // 2
    registers = [f"%{i}" for i in range(count)]
    lines = [", ".join(registers[i : i + 16]) for i in range(0, count, 16)]
    braces = ',\\n"\n        "'.join(lines)
    a_count = 1 if name == "ss" else 4
    a = f"%{count}" if name == "ss" else "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
    b, scale = count + a_count, count + a_count + 1
    tail = f"p, 1, 1, %{scale + 1}, %{scale + 2}" if name == "ss" else f"p, 1, 1, %{scale + 1}"
    flags = ["kATransposed", "kBTransposed"] if name == "ss" else ["kBTransposed"]
    immediates = ", ".join(f'"n"(static_cast<int>({flag}))' for flag in flags)
    a_type = "uint64_t a" if name == "ss" else "const uint32_t (&a)[4]"
    a_operands = '"l"(a)' if name == "ss" else ", ".join(f'"r"(a[{i}])' for i in range(4))
    outputs = [f'"+f"(d[{i}])' for i in range(count)]
    output_lines = ",\n          ".join(", ".join(outputs[i : i + 8]) for i in range(0, count, 8))
    arguments = f"float (&d)[{count}], {a_type}, uint64_t b, bool accumulate"
    return f"""  static __device__ __forceinline__ void {name}({arguments}) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{scale}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{\\n"
        "{braces}}},\\n"
        "{a}, %{b}, {tail};\\n}}\\n"
        : {output_lines}
        : {a_operands}, "l"(b), "r"(static_cast<int>(accumulate)), {immediates});
  }}
"""


def generate() -> str:
    """The header's text."""
    parts = [HEAD]
    for columns in COLUMNS:
        for element, kind in TYPES.items():
            parts.append(
                f"\ntemplate <bool kBTransposed, bool kATransposed>\n"
                f"struct Wgmma<{element}, {columns}, kBTransposed, kATransposed> {{\n"
                f"{function('ss', columns, kind)}\n{function('rs', columns, kind)}}};\n"
            )
    return (
        "// clang-format off\n" + "".join(parts) + "\n}  // namespace flashmask::sm90\n// clang-format on\n"
    )


def main() -> int:
    """Write or check the header; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if out of date")
    if parser.parse_args().check:
        return int(not OUTPUT.exists() or OUTPUT.read_text() != generate())
    OUTPUT.write_text(generate())
    return 0


if __name__ == "__main__":
    sys.exit(main())
