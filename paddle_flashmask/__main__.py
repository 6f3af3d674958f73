"""``python -m paddle_flashmask``: ``info`` what would run, ``show`` a mask, ``bench`` one's own device."""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

import paddle_flashmask
from paddle_flashmask._processor import processor_fields
from paddle_flashmask.masks import registry

DTYPES = ("float16", "bfloat16", "float32", "float64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 if nothing can run, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m paddle_flashmask", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    info_parser = commands.add_parser("info", help="versions, devices, built kernels, and which would run")
    info_parser.add_argument(
        "--shape",
        type=_shape,
        metavar="B,Sq,Sk,Hq,Hk,D[,Dv]",
        help="say which kernel would run for these sizes",
    )
    info_parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    info_parser.add_argument("--device", choices=("cpu", "gpu"), help="default: Paddle's current one")
    info_parser.add_argument("--dropout", action="store_true", help="say it for dropout")
    info_parser.add_argument("--deterministic", action="store_true", help="say it for deterministic mode")
    info_parser.set_defaults(
        run=lambda options: info(
            options.shape,
            options.dtype,
            options.device,
            dropout=options.dropout,
            deterministic=options.deterministic,
        )
    )

    show_parser = commands.add_parser(
        "show", help="draw a named mask and say what it costs (no Paddle needed)"
    )
    show_parser.add_argument("mask", nargs="?", metavar="MASK", help="a name; without one, lists the names")
    show_parser.add_argument("--seqlen", type=int, default=256, metavar="N", help="default: %(default)s")
    show_parser.add_argument("--seed", type=int, default=0, help="of the random data; default: %(default)s")
    show_parser.add_argument(
        "--cells", type=int, default=32, help="at most so many along a side; default: %(default)s"
    )
    show_parser.set_defaults(
        run=lambda options: show(options.mask, options.seqlen, options.seed, options.cells)
    )

    bench_parser = commands.add_parser(
        "bench",
        help="time the masks on this device and compare with a dense mask, in about two minutes",
        description="Times attention under each mask, forward and backward, once its results are right, "
        "beside Paddle's own attention with a dense mask.",
    )
    bench_parser.add_argument(
        "--shape",
        type=_shape,
        metavar="B,Sq,Sk,Hq,Hk,D[,Dv]",
        help="samples, queries, keys, heads of queries and of keys, head dims; "
        "default: 1,2048,2048,8,8,64 on a CPU, 4,8192,8192,32,32,128 on a GPU",
    )
    bench_parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    bench_parser.add_argument("--device", choices=("cpu", "gpu"), help="default: Paddle's current one")
    bench_parser.add_argument(
        "--masks",
        type=_mask,
        nargs="+",
        metavar="MASK",
        help="names of masks, of those that `show` lists; default: the paper's twelve, "
        "or full, causal and sliding_window where Sq and Sk differ",
    )
    bench_parser.add_argument(
        "--seconds", type=_seconds, default=120.0, help="to take, about; default: %(default)g"
    )
    bench_parser.set_defaults(
        run=lambda options: bench(
            options.shape, options.dtype, options.device, options.masks, options.seconds
        )
    )

    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except ValueError as error:
        commands.choices[options.command].error(str(error))
    except MemoryError as error:
        print(f"out of memory: {error}")
        return 1
    return status


def show(name: str | None, seqlen: int, seed: int, cells: int) -> int:
    """Prints a named mask's drawing, sparsity and memory, or the list of names."""
    if name is None:
        width = max(map(len, registry.names()))
        for entry in registry.REGISTRY.values():
            print(f"{entry.name:<{width}}  row i sees column j iff {entry.rule}")
        return 0
    mask = registry.make(name, seqlen, seed)
    indices, causal = mask.to_startend_row_indices()
    mask.show(max_cells=cells)
    dense = seqlen * seqlen
    _print_table(
        {
            "mask": f"{name}: row i sees column j iff {registry.REGISTRY[name].rule}",
            "form": repr(mask),
            "visible": f"{mask.visible_area():,} of {dense:,} elements",
            "block sparsity": f"{mask.block_sparsity():.3f} of all 128x128 tiles are skipped",
            "mask memory": f"{0 if indices is None else indices.nbytes:,} bytes"
            + (" (causal alone says it)" if indices is None and causal else ""),
            "dense mask": f"{dense:,} bytes as booleans, {2 * dense:,} as a bfloat16 bias",
        }
    )
    return 0


def info(
    shape: tuple[int, ...] | None,
    dtype: str,
    device: str | None,
    *,
    dropout: bool = False,
    deterministic: bool = False,
) -> int:
    """Prints versions, devices and kernels; with a shape, also the kernel that would run and why."""
    lines = {
        "paddle_flashmask": f"{paddle_flashmask.__version__} at {os.path.dirname(paddle_flashmask.__file__)}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "numpy": np.__version__,
    }
    paddle, problem = _import_paddle()
    if paddle is None:
        _print_table({**lines, "paddle": f"cannot be imported: {problem}"})
        print("\nMasks work without Paddle; attention needs it: pip install paddlepaddle")
        return 1
    cuda = f"CUDA {paddle.version.cuda()}" if paddle.is_compiled_with_cuda() else "CPU build"
    lines["paddle"] = f"{paddle.__version__} ({cuda})"
    gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    names = [f"gpu:{i} {paddle.device.cuda.get_device_name(i)}" for i in range(gpus)]
    lines["devices"] = ", ".join([f"cpu ({os.cpu_count()} processors)", *names])
    problem = _load_problem()
    lines["operators"] = "built and loaded" if problem is None else "NOT AVAILABLE"
    if problem is None:
        lines["kernels"] = f"cpu: {', '.join(DTYPES)}; any head dims; {_cpu_threads()}"
        lines["CUDA kernels"] = _cuda_kernels()
    _print_table(lines)
    if problem is not None:
        print(f"\n{problem}")
        return 1
    if shape is None:
        return 0
    device = device or paddle.device.get_device().partition(":")[0]
    kernel, reason = choose_kernel(shape, dtype, device, dropout=dropout, deterministic=deterministic)
    print(f"\n{_sizes(shape)}, {dtype} on {device}: {kernel or 'NO KERNEL'} ({reason})")
    return 0 if kernel else 1


def bench(
    shape: tuple[int, ...] | None,
    dtype: str | None,
    device: str | None,
    masks: Sequence[str] | None,
    seconds: float,
) -> int:
    """Says how fast the masks are, and a verdict; 1 if nothing runs or a result is wrong or unchecked."""
    from paddle_flashmask import _bench

    paddle, problem = _import_paddle()
    if paddle is None:
        print(f"paddle cannot be imported: {problem}\n\nbench needs it: pip install paddlepaddle")
        return 1
    problem = _load_problem()
    if problem is not None:
        print(problem)
        return 1
    device = device or paddle.device.get_device().partition(":")[0]
    shape, dtype = shape or _bench.DEFAULT_SHAPES[device], dtype or _bench.DEFAULT_DTYPES[device]
    kernel, reason = choose_kernel(shape, dtype, device)
    if kernel is None:
        print(f"{_sizes(shape)}, {dtype} on {device}: NO KERNEL ({reason})")
        return 1
    made = _bench.prepare(shape, dtype, device, masks)
    print(
        "Attention under each mask, checked and timed forward and backward, "
        f"beside Paddle's own with a dense mask; about {seconds:g} s"
    )
    print(f"{_sizes(shape)}, {dtype} on {_device_name(paddle, device)}: {kernel} ({reason})\n", flush=True)
    report = _bench.measure(shape, dtype, device, made, seconds)
    print(_bench.render(report))
    return int(bool(report.problems))


def _import_paddle() -> tuple[Any, str | None]:
    """Paddle, or None and why it cannot be imported."""
    try:
        with warnings.catch_warnings():
            # Paddle's import looks for a compiler's cache, but here nothing is compiled.
            warnings.filterwarnings("ignore", "No ccache found", UserWarning)
            import paddle
    except ImportError as error:
        return None, str(error)
    return paddle, None


def _device_name(paddle: Any, device: str) -> str:
    if device == "gpu":
        return str(paddle.device.cuda.get_device_name())
    name = processor_fields().get("model name", platform.machine())
    return f"{name}, {os.cpu_count()} processors, {_cpu_threads()}"


def _sizes(shape: tuple[int, ...]) -> str:
    names = ("B", "Sq", "Sk", "Hq", "Hk", "D", "Dv")
    return ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))


def choose_kernel(
    shape: tuple[int, ...],
    dtype: str,
    device: str,
    *,
    dropout: bool = False,
    deterministic: bool = False,
) -> tuple[str | None, str]:
    """The kernel that the operator takes, or None, and why.

    Args:
        shape: B, Sq, Sk, Hq, Hk, D, Dv.
        dtype: of q, k and v.
        device: "cpu" or "gpu".
        dropout: with dropout.
        deterministic: in deterministic mode.
    """
    from paddle_flashmask import _ops

    batch, seqlen_q, seqlen_k, heads_q = shape[:4]
    if 0 in (batch, seqlen_q, heads_q):
        return "none needed", "there is no query row: the result is empty"
    if seqlen_k == 0:
        return "none needed", "there is no key: zeros, and lse -inf"
    if device == "cpu":
        if not _ops.cpu_threads():
            return None, _cpu_threads()
        accumulator = "float64" if dtype == "float64" else "float32"
        return "cpu", f"tensors on a CPU; sums in {accumulator}"
    return _choose_cuda_kernel(shape, dtype, dropout=dropout, deterministic=deterministic)


def _choose_cuda_kernel(
    shape: tuple[int, ...], dtype: str, *, dropout: bool, deterministic: bool
) -> tuple[str | None, str]:
    from paddle_flashmask import _checks, _ops

    if not _ops.cuda_kernels():
        return None, "this build has no CUDA kernels; move the tensors to the CPU"
    if dtype not in _checks.CUDA_FLOATS:
        return None, f"CUDA kernels take {' and '.join(_checks.CUDA_FLOATS)}"
    if any(dim % 8 != 0 or dim > 256 for dim in shape[5:]):
        return None, "CUDA kernels take head dims that are multiples of 8 up to 256"
    parts = []
    for name, backward in (("forward", False), ("backward", True)):
        kernels = []
        for bounds in (1, 0):
            found, text = _ops.describe_cuda_kernel(
                *(dtype, shape),
                backward=backward,
                bounds=bounds,
                dropout=dropout,
                deterministic=deterministic and backward,
            )
            if not found:
                return None, text
            kernels.append(text)
        masked, bare = kernels
        parts.append(f"{name}: {masked}")
        if bare != masked:
            parts.append(f"{name} without startend_row_indices: {bare}")
    return "CUDA", "; ".join(parts)


def _cpu_threads() -> str:
    """How many threads the CPU kernel would take."""
    from paddle_flashmask import _ops

    threads = _ops.cpu_threads()
    if threads == 0:
        return "NO CALL WILL RUN: FLASHMASK_NUM_THREADS is no number of threads"
    return f"at most {threads} thread{'s' * (threads > 1)}"


def _cuda_kernels() -> str:
    """The CUDA kernels of the build in a line."""
    from paddle_flashmask import _ops

    if not _ops.cuda_kernels():
        return "none built"
    # Names such as sm80_forward_d192_128_bf16.
    families = sorted({name.partition("_")[0] for name in _ops.cuda_kernels()})
    dims = {name.partition("_d")[2].rpartition("_")[0] for name in _ops.cuda_kernels()}
    listed = sorted(tuple(map(int, dim.split("_"))) for dim in dims)
    return (
        f"{', '.join(families)}, for compute capability {', '.join(_ops.cuda_targets())}; "
        f"head dims up to {', '.join('/'.join(map(str, dim)) for dim in listed)}"
    )


def _load_problem() -> str | None:
    """Why the operators cannot be loaded, with what to do about it; None if they can."""
    try:
        paddle_flashmask.load_operators()
    except (ImportError, OSError, RuntimeError) as error:
        return str(error)
    return None


def _shape(text: str) -> tuple[int, ...]:
    """B, Sq, Sk, Hq, Hk, D, Dv from the text of --shape."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers B,Sq,Sk,Hq,Hk,D[,Dv], got {text}") from None
    if len(sizes) not in (6, 7) or min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"expected 6 or 7 sizes B,Sq,Sk,Hq,Hk,D[,Dv], got {text}")
    heads_q, heads_k = sizes[3:5]
    if min(sizes[3:]) == 0 or heads_q % heads_k != 0:
        raise argparse.ArgumentTypeError(
            f"expected heads and dims above 0 and Hk a divisor of Hq, got {text}"
        )
    return tuple(sizes) if len(sizes) == 7 else (*sizes, sizes[5])


def _mask(text: str) -> str:
    """The name of a mask."""
    if text not in registry.REGISTRY:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(registry.names())}, got {text}")
    return text


def _seconds(text: str) -> float:
    """A finite number of seconds, 0 or more."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text}")
    return seconds


def _print_table(lines: dict[str, str]) -> None:
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    sys.exit(main())
