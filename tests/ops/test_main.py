"""``python -m paddle_flashmask``: what it prints, and that ``show`` works without Paddle."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest

import paddle_flashmask
from paddle_flashmask import __main__ as cli
from paddle_flashmask.masks import registry


def run(capsys, *arguments):
    """Exit status and output of one call."""
    status = cli.main(arguments)
    return status, capsys.readouterr().out


@pytest.mark.parametrize("name", registry.names())
def test_show_every_mask(capsys, name):
    status, out = run(capsys, "show", name, "--seqlen", "100", "--cells", "10")
    assert status == 0
    drawing = out.splitlines()[:10]
    assert all(set(line) <= set("#+. ") and len(line) == 19 for line in drawing)
    mask = registry.make(name, 100)
    assert repr(mask) in out
    assert f"visible         {mask.visible_area():,} of 10,000 elements" in out
    assert "dense mask      10,000 bytes as booleans, 20,000 as a bfloat16 bias" in out


def test_show_counts_the_bytes_of_the_indices(capsys):
    assert "mask memory     0 bytes (causal alone says it)" in run(capsys, "show", "causal")[1]
    _, out = run(capsys, "show", "causal_document", "--seqlen", "1000")
    assert "mask memory     4,000 bytes\n" in out  # one int32 per column
    _, out = run(capsys, "show", "global_sliding_window", "--seqlen", "1000")
    assert "mask memory     16,000 bytes\n" in out


def test_show_depends_on_the_seed(capsys):
    first, second, again = (run(capsys, "show", "document", "--seed", seed)[1] for seed in ("1", "2", "1"))
    assert first == again != second


def test_show_lists_the_names(capsys):
    status, out = run(capsys, "show")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == registry.names()


def test_show_needs_no_paddle():
    code = (
        "import sys; sys.modules['paddle'] = None; from paddle_flashmask.__main__ import main; "
        "sys.exit(main(['show', 'causal', '--seqlen', '8']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("# . . .")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "cuasal"), "expected one of full, causal,"),
        (("show", "causal", "--seqlen", "-1"), "seqlen: expected"),
        (("show", "causal", "--seqlen", "many"), "invalid int value: 'many'"),
        (("info", "--shape", "1,2,3"), "expected 6 or 7 sizes"),
        (("info", "--shape", "1,2,3,4,x,6"), "expected integers"),
        (("info", "--shape", "1,2,3,4,3,6"), "Hk a divisor of Hq"),
        (("info", "--dtype", "int8"), "invalid choice: 'int8'"),
        (
            ("bench", "--shape", "1,2,3,4,2,64", "--device", "cpu", "--masks", "full", "document"),
            "expected some of full, causal, sliding_window, got document with Sq = 2 and Sk = 3",
        ),
        (("bench", "--masks", "cuasal", "--device", "cpu"), "expected one of full, causal,"),
        (
            ("bench", "--shape", "1,0,0,4,2,64", "--device", "cpu"),
            "expected sizes above 0, got 1,0,0,4,2,64,64",
        ),
        (
            ("bench", "--shape", "1,9000000000,1,4,4,64", "--device", "cpu"),
            "inputs, results and gradients take at least 36864.0 GB, and there are ",
        ),
        ((), "the following arguments are required: COMMAND"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith(" ".join(["usage: python -m paddle_flashmask", *arguments[:1], "[-h]"]))
    assert printed.out == ""


def test_info(capsys):
    paddle = pytest.importorskip("paddle")
    status, out = run(capsys, "info")
    assert status == 0
    assert paddle_flashmask.__version__ in out
    assert paddle.__version__ in out
    assert "operators         built and loaded" in out
    assert "kernels           cpu:" in out


@pytest.mark.parametrize(
    ("threads", "says"),
    [
        ("1", "any head dims; at most 1 thread\n"),
        ("3", "any head dims; at most 3 threads\n"),
        ("many", "NO CALL WILL RUN: FLASHMASK_NUM_THREADS is no number of threads\n"),
    ],
)
def test_info_says_how_many_threads_the_cpu_kernel_takes(capsys, monkeypatch, threads, says):
    pytest.importorskip("paddle")
    monkeypatch.setenv("FLASHMASK_NUM_THREADS", threads)
    assert says in run(capsys, "info")[1]


def test_no_kernel_runs_on_a_cpu_without_threads(capsys, monkeypatch):
    pytest.importorskip("paddle")
    monkeypatch.setenv("FLASHMASK_NUM_THREADS", "many")
    status, out = run(capsys, "info", "--shape", "1,64,64,8,8,64", "--device", "cpu")
    assert status == 1
    assert "float32 on cpu: NO KERNEL (NO CALL WILL RUN: " in out
    status, out = run(capsys, "bench", *SMALL)
    assert status == 1
    assert ": NO KERNEL (" in out


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "soon"])
def test_bench_takes_a_finite_time(capsys, seconds):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--seconds", seconds])
    assert f"expected a number of seconds, got {seconds}" in capsys.readouterr().err


def test_info_keeps_paddles_hint_about_ccache_to_itself():
    pytest.importorskip("paddle")
    command = [sys.executable, "-m", "paddle_flashmask", "info"]
    assert "ccache" not in subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(
    ("shape", "device", "status", "line"),
    [
        (
            "1,4096,4096,8,2,64",
            "cpu",
            0,
            "D=64, Dv=64, bfloat16 on cpu: cpu (tensors on a CPU; sums in float32)",
        ),
        ("1,5,0,8,8,64,32", "cpu", 0, "Dv=32, bfloat16 on cpu: none needed (there is no key: zeros, and"),
        ("1,0,7,8,8,64", "cpu", 0, "none needed (there is no query row"),
    ],
)
def test_info_says_which_kernel_would_run(capsys, shape, device, status, line):
    pytest.importorskip("paddle")
    actual, out = run(capsys, "info", "--shape", shape, "--dtype", "bfloat16", "--device", device)
    assert actual == status
    assert line in out


CUDA_KERNELS = ("sm80_forward_d64_bf16", "sm80_backward_d64_bf16", "sm80_forward_d192_128_fp16")


@pytest.mark.parametrize(
    ("kernels", "shape", "dtype", "status", "reason"),
    [
        ((), "1,64,64,8,8,64", "bfloat16", 1, "NO KERNEL (this build has no CUDA kernels; move the tensors"),
        (CUDA_KERNELS, "1,64,64,8,8,64", "float32", 1, "NO KERNEL (CUDA kernels take float16 and bfloat16)"),
        (CUDA_KERNELS, "1,64,64,8,8,64,60", "float16", 1, "NO KERNEL (CUDA kernels take head dims that are"),
        (CUDA_KERNELS, "1,64,64,8,8,256", "float16", 1, "NO KERNEL (too wide)"),
        (CUDA_KERNELS, "1,64,64,8,8,64", "float16", 0, "gpu: CUDA (forward: tiles; backward: tiles)"),
        (
            *(CUDA_KERNELS, "1,64,64,8,8,128", "float16", 0),
            "(forward: tiles; forward without startend_row_indices: wide tiles; backward: tiles)",
        ),
    ],
)
def test_info_says_which_cuda_kernel_would_run(capsys, monkeypatch, kernels, shape, dtype, status, reason):
    pytest.importorskip("paddle")
    from paddle_flashmask import _ops

    def describe(dtype, shape, *, backward, bounds, dropout, deterministic):
        assert (dropout, deterministic) == (False, False)
        if shape[5] > 192:
            return False, "too wide"
        return True, "wide tiles" if shape[5] == 128 and not backward and bounds == 0 else "tiles"

    monkeypatch.setattr(_ops, "cuda_kernels", lambda: kernels)
    monkeypatch.setattr(_ops, "cuda_targets", lambda: ("80", "90"))
    monkeypatch.setattr(_ops, "describe_cuda_kernel", describe)
    actual, out = run(capsys, "info", "--shape", shape, "--dtype", dtype, "--device", "gpu")
    assert actual == status
    assert reason in out
    built = "sm80, for compute capability 80, 90; head dims up to 64, 192/128" if kernels else "none built"
    assert f"CUDA kernels      {built}\n" in out


def test_info_asks_for_what_is_wanted(capsys, monkeypatch):
    pytest.importorskip("paddle")
    from paddle_flashmask import _ops

    asked = []

    def describe(dtype, shape, *, backward, bounds, dropout, deterministic):
        asked.append((dtype, shape, backward, bounds, dropout, deterministic))
        return True, "tiles"

    monkeypatch.setattr(_ops, "cuda_kernels", lambda: CUDA_KERNELS)
    monkeypatch.setattr(_ops, "cuda_targets", lambda: ("80", "90"))
    monkeypatch.setattr(_ops, "describe_cuda_kernel", describe)
    wanted = ["--shape", "1,1,9,8,2,64", "--dtype", "bfloat16", "--dropout", "--deterministic"]
    assert run(capsys, "info", *wanted, "--device", "gpu")[0] == 0
    shape = (1, 1, 9, 8, 2, 64, 64)
    assert asked == [
        ("bfloat16", shape, backward, bounds, True, backward)
        for backward in (False, True)
        for bounds in (1, 0)
    ]


def test_info_without_operators_says_how_to_build_them(capsys, monkeypatch):
    pytest.importorskip("paddle")

    def not_built():
        raise ImportError("paddle_flashmask's operators are not built; run pip install")

    monkeypatch.setattr(paddle_flashmask, "load_operators", not_built)
    status, out = run(capsys, "info", "--shape", "1,2,3,4,2,64")
    assert status == 1
    assert "operators         NOT AVAILABLE" in out
    assert "operators are not built; run pip install" in out


def test_info_without_paddle(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "paddle", None)
    status, out = run(capsys, "info")
    assert status == 1
    assert "paddle            cannot be imported" in out
    assert "pip install paddlepaddle" in out


def paddle_with_dense_masks():
    """Paddle, if its own attention takes masks on a CPU."""
    paddle = pytest.importorskip("paddle")
    if paddle.__version__.startswith("2."):
        pytest.skip("Paddle 2's own attention does not run on a CPU")
    return paddle


SMALL = ("--shape", "1,256,256,4,2,32", "--device", "cpu", "--seconds", "0.1")
SEVERAL = (*SMALL[:-1], "2", "--masks")  # time for several masks


def test_bench(capsys):
    paddle_with_dense_masks()
    assert cli.main(["bench", *SEVERAL, "full", "causal_document", "sliding_window"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].endswith(" beside Paddle's own with a dense mask; about 2 s")
    assert lines[1].startswith("B=1, Sq=256, Sk=256, Hq=4, Hk=2, D=32, Dv=32, float32 on ")
    assert [line.split()[0] for line in lines[4:8]] == [
        "full",
        "causal_document",
        "sliding_window",
        "Paddle,",
    ]
    assert lines[3].split()[-2:] == ["speed/full", "speed/dense"]
    assert lines[4].split()[1] == "0.000"
    rows = [line.split() for line in lines[4:8]]
    assert rows[0][-2] == rows[3][-1] == "1.00"
    total = [float(row[-4]) for row in rows]
    assert float(rows[1][-2]) == pytest.approx(total[0] / total[1], rel=0.05)
    assert float(rows[1][-1]) == pytest.approx(total[3] / total[1], rel=0.05)
    assert lines[-1].startswith("packed documents (sparsity ")
    assert " times as fast as Paddle's dense mask, " in lines[-1]
    assert len(lines[-1]) <= 150
    steps = [line.partition(" s left, ")[2] for line in printed.err.splitlines()]  # no bar but on a terminal
    assert steps == ["inputs", "causal_document", "a dense mask", "full", "sliding_window"]


def test_bench_says_at_once_what_it_does():
    """Through a pipe: the first lines are there before what they announce."""
    pytest.importorskip("paddle")
    command = [
        sys.executable,
        "-m",
        "paddle_flashmask",
        "bench",
        *SMALL[:-1],
        "10",
        "--masks",
        "full",
        "causal",
    ]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered
    ) as process:
        first = [process.stdout.readline() for _ in range(2)]
        process.kill()
        steps = process.stderr.read()
    assert first[0].startswith("Attention under each mask")
    assert ", float32 on " in first[1]
    assert "s left, causal" not in steps


@pytest.mark.parametrize("shape", ["1,1,300,4,2,32", "1,200,300,4,2,32", "2,300,200,4,2,32"])
@pytest.mark.parametrize("device_has_dense", [True, False])
def test_bench_of_other_lengths(capsys, monkeypatch, shape, device_has_dense):
    """Sq != Sk: the masks that have two lengths, by default; the verdict is of those."""
    from paddle_flashmask import _bench

    if device_has_dense:
        paddle_with_dense_masks()
    else:
        pytest.importorskip("paddle")
        monkeypatch.setattr(_bench, "_dense", run_out_of_memory)
    status, out = run(capsys, "bench", *SMALL[:-1], "1", "--shape", shape)
    assert status == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[4:7]] == ["full", "causal", "sliding_window"]
    assert ("\nPaddle, dense" in out) == device_has_dense
    assert lines[-1].endswith("times as fast as no mask")


def test_bench_masks_of_other_lengths_end_with_the_last_key():
    from paddle_flashmask import _bench

    masks = _bench.prepare((1, 2, 64, 1, 1, 8, 8), "float32", "cpu", None)
    row, column = np.ogrid[62:64, :64]
    assert masks["full"].to_dense().all()
    assert (masks["causal"].to_dense() == (column <= row)).all()
    assert (masks["sliding_window"].to_dense() == ((column <= row) & (row - column <= 4))).all()


@pytest.mark.parametrize(
    ("masks", "dense", "verdict"),
    [
        (
            {"full": 4.0, "causal": 2.0, "document": 1.0},
            8.0,
            "2.00 (full) to 8.00 (document) times as fast as Paddle's dense mask; "
            "2.00 (causal) to 4.00 (document) times as fast as no mask",
        ),
        (
            {"causal": 2.0, "document": 4.0},
            3.0,
            "0.75 (document) to 1.50 (causal) times as fast as Paddle's dense mask",
        ),
        ({"full": 4.0, "causal": 2.0}, None, "2.00 (causal) times as fast as no mask"),
        ({"full": 4.0}, 6.0, "1.50 (full) times as fast as Paddle's dense mask"),
        ({"full": 4.0}, None, "timed alone: no other mask or dense mask to compare with"),
        (
            {"causal_document": 1.0, "full": 4.0},
            None,
            "packed documents (sparsity 0.50): 4.0 times as fast as no mask; "
            "least FLOP/s: 100 % of no mask's (full)",
        ),
        (
            {"causal_document": 1.0},
            3.0,
            "packed documents (sparsity 0.50): 3.0 times as fast as Paddle's dense mask",
        ),
    ],
)
def test_bench_verdict(masks, dense, verdict):
    from paddle_flashmask import _bench

    timings = [
        _bench.Timing(name, 0.5, total / 4, total * 3 / 4, 1e9 * (1 + (name == "causal_document")), 9)
        for name, total in masks.items()
    ]
    beside = None if dense is None else _bench.Timing("dense mask", 0.0, dense / 2, dense / 2, 1e9, 9)
    assert _bench.Report(timings, beside, "", {}, []).verdict == verdict


def test_bench_says_which_times_are_rough():
    from paddle_flashmask import _bench

    timings = [_bench.Timing("full", 0.0, 1.0, 1.0, 1e9, 5), _bench.Timing("causal", 0.5, 1.0, 1.0, 1e9, 4)]
    text = _bench.render(_bench.Report(timings, None, "", {}, []))
    assert "\nrough, of fewer than 5 repetitions: causal: --seconds gives more\n" in text


@pytest.mark.parametrize(
    ("message", "short"),
    [
        (
            "(NotFound) No kernel `a.b` for it.  Take\n others.\n  [Hint: x] (at y.cc:3)\n",
            "(NotFound) No kernel `a.b` for it.",
        ),
        ("too large", "too large"),
        ("word " * 60, "word " * 39 + "..."),
        ("", "MemoryError"),
    ],
)
def test_bench_shortens_errors_to_sentences_or_words(message, short):
    from paddle_flashmask import _bench

    assert _bench._in_short(MemoryError(message)) == short


def test_bench_takes_every_named_mask_and_says_which_it_had_no_time_for(capsys):
    pytest.importorskip("paddle")
    _, out = run(capsys, "bench", *SMALL[:-1], "0", "--dtype", "bfloat16")
    *_, left, empty, verdict = out.splitlines()
    others = [name for name in registry.names(paper_only=True) if name != "causal_document"]
    assert left == f"no time for {', '.join(others)}: --seconds gives more"
    assert empty == ""
    assert verdict.startswith("packed documents (sparsity ")


def test_the_processor_has_a_name():
    from paddle_flashmask.__main__ import _device_name

    name = _device_name(None, "cpu").split(", ")[0]
    assert name.strip()
    assert "\n" not in name


def disturb(monkeypatch, change):
    """Puts ``change(q, k, v, out of attention, mask)`` in the place of attention."""
    attend = paddle_flashmask.attention

    def changed(q, k, v, *, mask):
        return change(q, k, v, attend(q, k, v, mask=mask), mask)

    monkeypatch.setattr(paddle_flashmask, "attention", changed)


def test_bench_checks_out_of_every_mask(capsys, monkeypatch):
    pytest.importorskip("paddle")
    causal = registry.make("causal", 256)
    disturb(monkeypatch, lambda q, k, v, out, mask: out * 1.001 if mask == causal else out)
    status, out = run(capsys, "bench", *SEVERAL, "full", "causal", "causal_document")
    assert status == 1
    assert "\ncausal: wrong results: out is off by " in out
    assert out.splitlines()[-1] == "FAILED: wrong, unchecked or untimed: causal; do not rely on them here"
    assert "\ncausal_document " in out


@pytest.mark.parametrize("wrong", ["dq", "dk", "dv"])
def test_bench_checks_gradients(capsys, monkeypatch, wrong):
    pytest.importorskip("paddle")

    def change(q, k, v, out, mask):
        # Adds zeros whose gradient is not zero.
        x = {"dq": q, "dk": k, "dv": v}[wrong]
        return out + 1e-2 * (x - x.detach()).sum()

    disturb(monkeypatch, change)
    status, out = run(capsys, "bench", *SMALL, "--masks", "full")
    assert status == 1
    assert f"full: wrong results: {wrong} is off by " in out
    assert out.splitlines()[-1].startswith("FAILED: ")


def run_out_of_memory(*arguments):
    raise MemoryError("too large")


def test_bench_ends_with_an_error_when_results_are_not_finite(capsys, monkeypatch):
    pytest.importorskip("paddle")
    disturb(monkeypatch, lambda q, k, v, out, mask: out * float("nan"))
    status, out = run(capsys, "bench", *SMALL, "--masks", "full", "--dtype", "bfloat16")
    assert status == 1
    assert "out is off by nan" in out


def test_bench_ends_with_an_error_when_results_cannot_be_checked(capsys, monkeypatch):
    pytest.importorskip("paddle")
    from paddle_flashmask import _bench

    monkeypatch.setattr(_bench, "attention_reference", run_out_of_memory)
    status, out = run(capsys, "bench", *SMALL, "--masks", "full")
    assert status == 1
    assert "full: could not be checked: too large" in out
    assert out.splitlines()[-1] == "FAILED: wrong, unchecked or untimed: full; do not rely on them here"


@pytest.mark.parametrize("shape", ["2,256,256,4,2,32,40", "1,2500,2500,4,2,16"])  # the second: not all rows
@pytest.mark.parametrize("dtype", cli.DTYPES)
def test_bench_finds_right_results_right(capsys, shape, dtype):
    pytest.importorskip("paddle")
    _, out = run(capsys, "bench", *SMALL, "--shape", shape, "--dtype", dtype, "--masks", "share_question")
    assert "\nshare_question " in out
    assert "FAILED" not in out


def test_bench_says_why_a_dense_mask_did_not_run(capsys, monkeypatch):
    pytest.importorskip("paddle")
    from paddle_flashmask import _bench

    monkeypatch.setattr(_bench, "_dense", run_out_of_memory)
    status, out = run(capsys, "bench", *SMALL, "--masks", "causal_document")
    assert status == 0
    assert "Paddle's attention with a dense mask is left out: too large" in out


def test_bench_leaves_a_dense_mask_out_that_memory_does_not_hold(capsys, monkeypatch):
    """Its mask and three values for each score of 4 heads, q, k, v, out and gradients, and a tenth more."""
    pytest.importorskip("paddle")
    from paddle_flashmask import _bench

    needed = 2048 * 2048 * 4 * (1 + 3 * 4) + 4 * 2 * 2048 * (4 + 2) * (32 + 32)
    needed += needed // 10
    monkeypatch.setattr(_bench, "_available_memory", lambda: needed - 1)
    monkeypatch.setattr(_bench, "_dense", lambda *arguments: pytest.fail("no dense mask is to be made"))
    arguments = ("bench", *SMALL, "--shape", "1,2048,2048,4,2,32", "--masks", "causal_document")
    status, out = run(capsys, *arguments)
    assert status == 0
    assert (
        "Paddle's attention with a dense mask is left out: "
        "it takes up to 0.2 GB of main memory, and 0.2 GB are available\n" in out
    )
    assert "\ncausal_document " in out
    monkeypatch.setattr(_bench, "_available_memory", lambda: needed)
    monkeypatch.setattr(_bench, "_dense", run_out_of_memory)
    assert "is left out: too large\n" in run(capsys, *arguments)[1]


@pytest.mark.parametrize(
    ("dtype", "device", "needed"),
    [
        ("float32", "cpu", 1.1 * (16 * 40000**2 + 8 * 4 * 40000 * 64)),
        ("float64", "cpu", 1.1 * (32 * 40000**2 + 8 * 8 * 40000 * 64)),
        ("bfloat16", "cpu", 1.1 * 10 * 40000**2),  # on a CPU Paddle has no attention of it: the mask alone
        ("bfloat16", "gpu", 1.1 * 10 * 40000**2),  # scores are on the GPU, and the mask is made on the CPU
    ],
)
def test_bench_counts_what_a_dense_mask_takes(dtype, device, needed):
    from paddle_flashmask import _bench

    assert _bench._dense_bytes((1, 40000, 40000, 1, 1, 64, 64), dtype, device) == pytest.approx(needed)


MEASURE = """
import re
import numpy as np
import paddle
from paddle_flashmask import _bench
from paddle_flashmask.masks import registry

def resident(key):
    with open("/proc/self/status") as file:
        return int(re.search(key + r":\\s+(\\d+) kB", file.read())[1]) * 1024

class Silent:
    def show(self):
        pass

def attend(seqlen):
    tensors = [_bench._normal(np.random.default_rng(0), (1, seqlen, 1, 64), "float32") for _ in range(4)]
    attend = _bench._dense(registry.make("causal_document", seqlen), 1, "float32")
    _bench._time(attend, tensors, "cpu", 0.0, Silent())

paddle.set_device("cpu")
attend(64)
before = resident("VmRSS")
attend(6000)
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
def test_a_dense_mask_takes_what_bench_counts():
    """The peak of a process of its own, in which no freed memory is used again."""
    paddle_with_dense_masks()
    from paddle_flashmask import _bench

    result = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    counted = _bench._dense_bytes((1, 6000, 6000, 1, 1, 64, 64), "float32", "cpu")
    assert 0.75 * counted <= int(result.stdout.split()[-1]) <= counted


GB = 1 << 30
MEMINFO = {"proc/meminfo": f"MemTotal:  {8 << 20} kB\nMemFree:  {1 << 20} kB\nMemAvailable:  {6 << 20} kB\n"}
V1 = "9:name=systemd:/\n4:cpu,memory:/pod/one\n"
UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (MEMINFO, 6 * GB),
        (
            {  # version 2: a limit above the process's own folder; what caches of files take counts as left
                **MEMINFO,
                "proc/self/cgroup": "0::/pod/one\n",
                "sys/fs/cgroup/pod/one/memory.max": "max\n",
                "sys/fs/cgroup/pod/one/memory.current": f"{GB}\n",
                "sys/fs/cgroup/pod/memory.max": f"{4 * GB}\n",
                "sys/fs/cgroup/pod/memory.current": f"{3 * GB}\n",
                "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_anon 7\ninactive_file 30\nactive_file 2\n",
            },
            GB + 32,
        ),
        (
            {  # in a container, whose folder is the top
                **MEMINFO,
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{2 * GB}\n",
                "sys/fs/cgroup/memory.current": f"{GB // 2}\n",
            },
            GB + GB // 2,
        ),
        (
            {  # more than the machine has left
                **MEMINFO,
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{20 * GB}\n",
                "sys/fs/cgroup/memory.current": f"{GB}\n",
            },
            6 * GB,
        ),
        (
            {
                **MEMINFO,
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/pod/one/memory.limit_in_bytes": f"{3 * GB}\n",
                "sys/fs/cgroup/memory/pod/one/memory.usage_in_bytes": f"{2 * GB}\n",
                "sys/fs/cgroup/memory/pod/one/memory.stat": "active_file 1\ntotal_active_file 10\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{UNLIMITED}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GB}\n",
            },
            GB + 10,
        ),
        (
            {  # version 1 in a container: the path is that outside
                **MEMINFO,
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB + 1}\n",
            },
            0,
        ),
        ({"proc/self/cgroup": "2:cpu:/one\n"}, None),
    ],
)
def test_available_memory(tmp_path, monkeypatch, files, available):
    from paddle_flashmask import _bench

    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert _bench._available_memory(tmp_path) == (4096000 if available is None else available)


def test_inputs_are_compared_with_available_memory(monkeypatch):
    pytest.importorskip("paddle")
    from paddle_flashmask import _bench

    shape = (1, 1000000, 1000000, 1, 1, 64, 64)  # 2.048 GB
    monkeypatch.setattr(_bench, "_available_memory", lambda: 2 * 10**9)
    with pytest.raises(ValueError, match=r"at least 2\.0 GB, and there are 2\.0 GB available, got 1,1000000"):
        _bench.prepare(shape, "float32", "cpu", ["full"])


def test_bench_keeps_what_it_measured_when_memory_runs_out_later(capsys, monkeypatch):
    pytest.importorskip("paddle")
    from paddle_flashmask import _bench

    time, calls = _bench._time, []

    def time_some(*arguments):
        calls.append(arguments)
        return run_out_of_memory() if len(calls) > 1 else time(*arguments)

    monkeypatch.setattr(_bench, "_time", time_some)
    status, out = run(capsys, "bench", *SEVERAL, "causal_document", "full")
    assert status == 1
    assert "\ncausal_document " in out
    assert "dense mask is left out: " in out
    assert "\nfull: could not be timed: too large\n" in out


def test_bench_leaves_a_dense_mask_out_when_paddle_has_no_kernels(capsys, monkeypatch):
    """As Paddle 2.6.2 on Hopper, whose kernels leave the zeros that were there."""
    paddle = pytest.importorskip("paddle")
    monkeypatch.setattr(paddle, "ones", paddle.zeros)
    status, out = run(capsys, "bench", *SEVERAL, "full", "causal_document")
    assert status == 0
    assert "\nPaddle, dense" not in out
    assert "is left out: this build of Paddle has no kernels of its own for this device" in out
    assert out.splitlines()[-1].startswith("packed documents (sparsity ")


def test_bench_leaves_a_dense_mask_out_when_it_is_wrong(capsys, monkeypatch):
    paddle = paddle_with_dense_masks()
    attend = paddle.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        paddle.nn.functional, "scaled_dot_product_attention", lambda q, k, v, attn_mask: attend(q, k, v)
    )
    status, out = run(capsys, "bench", *SMALL, "--masks", "causal_document")
    assert status == 0
    assert "dense mask is left out: wrong results: out is off by " in out


def test_bench_shows_a_bar_on_a_terminal(monkeypatch):
    from paddle_flashmask import _bench

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    clock = [100.0]
    monkeypatch.setattr(_bench.time, "monotonic", lambda: clock[0])
    terminal = Terminal()
    progress = _bench.Progress(120.0, terminal)
    progress.show("full")
    clock[0] += 60.0
    progress.show()
    progress.show()  # the same: not written again
    progress.clear()
    first, second, *rest = terminal.getvalue().split("\r")[1:]
    assert first == f"[{'.' * 30}]  120 s left, {'full':<28}"
    assert second == f"[{'#' * 15}{'.' * 15}]   60 s left, {'full':<28}"
    assert rest == [" " * len(second), ""]


def test_bench_takes_two_minutes_by_default(monkeypatch):
    taken = []
    monkeypatch.setattr(cli, "bench", lambda *options: taken.append(options[-1]) or 0)
    assert cli.main(["bench"]) == 0
    assert taken == [120.0]


def test_bench_without_a_kernel_or_paddle(capsys, monkeypatch):
    pytest.importorskip("paddle")
    status, out = run(capsys, "bench", "--device", "gpu", "--dtype", "float32")
    assert status == 1
    assert "NO KERNEL" in out
    monkeypatch.setitem(sys.modules, "paddle", None)
    status, out = run(capsys, "bench")
    assert status == 1
    assert out.startswith("paddle cannot be imported: ")
