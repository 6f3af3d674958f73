"""Benchmark the forward pass as inference takes it, beside FlashInfer, where it is there, and FlexAttention.

python scripts/bench/inference.py --prepare    # lets FlexAttention and FlashInfer compile on all cores first
python scripts/bench/inference.py              # a minute then, else 4 (mostly compiling), by estimate
python scripts/bench/inference.py --peers      # ours alone, half a minute by estimate
python scripts/bench/inference.py --report-only

The paper's setting: bfloat16, one sample, 32 query and 8 key heads of 128; causal documents, shared questions
and documents at 8 K, 32 K and 128 K tokens. FlashInfer gets a packed dense mask, and block-sparse ones of 64
and 16 rows and columns; what it takes to make these is not timed. Results are checked before timing, and all
take turns. Rows are appended to inference.csv as they are measured; a later call leaves out what is there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cells import PEER_NAMES, ROOT, ROUNDS, Case, Row, read_rows
from prepare import add_prepare_argument, prepare, share_compiled
from provenance import check_ready, count, recorded_command
from report import cards, failures_of, origin
from results import Results, document, length_name, markdown_table, not_run

MASKS = ("causal_document", "share_question", "document")
LENGTHS = (8192, 32768, 131072)
PEERS = ("flashinfer_dense", "flashinfer_sparse", "flashinfer_sparse_16", "flex", "flex_flash")


def inference_case(mask: str, seqlen: int) -> Case:
    """Return a case of the paper's setting."""
    return Case(mask, seqlen, 128, batch=1, heads=32, kv_heads=8)


def parse_arguments() -> tuple[argparse.Namespace, str]:
    """Return the arguments, as the kernel benchmark's runner takes them, and the command to record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", default="cuda", choices=["sm80", "sm90", "cuda"], help="cuda: the best")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--lengths", nargs="+", type=count, default=list(LENGTHS))
    parser.add_argument("--seconds", type=float, default=0.1, help="per implementation and case")
    parser.add_argument(
        "--library", dest="binary", type=Path, default=ROOT / "build" / "libflashmask_cuda.so"
    )
    parser.add_argument("--csv", type=Path, default=ROOT / "docs" / "results" / "inference.csv")
    parser.add_argument("--markdown", type=Path, help="default: the CSV file's name, .md")
    parser.add_argument("--commit", help="recorded with the rows; by default git is asked")
    add_prepare_argument(parser)
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    parser.add_argument(
        "--no-report", action="store_true", help="measure, and leave the rest to --report-only"
    )
    arguments = parser.parse_args()
    command = recorded_command("inference.py", parser, arguments)
    arguments.markdown = arguments.markdown or arguments.csv.with_suffix(".md")
    arguments.directions, arguments.deterministic, arguments.bars = ["forward"], False, False
    arguments.rounds = ROUNDS
    return arguments, command


def render(rows: Sequence[Row], kernels: str) -> str:
    """Return the paper's tables, one per mask, as a Markdown document."""
    parts = [
        "# Inference",
        "Written by scripts/bench/inference.py from the CSV file beside it. Forward, bfloat16, one sample, "
        "32 query and 8 key heads of 128. R/C: rows and columns of a block that is computed or skipped "
        "whole, where a method has such blocks. TFLOP = 4 S² D H (1 - rho), rho of 128x128 tiles. Times of "
        "ours include all that is done with the mask; block masks, packing and plans of the others are not "
        "timed, nor is compilation. Results were checked before timing. How many times as fast ours is was "
        "measured in one run with that method; the row of ours is of the newest run.",
    ]
    for card in cards(rows, kernels):
        results = Results(rows, kernels, card)
        parts += [f"## {card}", origin(results.rows)]
        for mask in MASKS:
            lines = [
                line
                for seqlen in sorted({row.case.seqlen for row in results.rows})
                for name in (*PEERS, kernels)
                if (line := _line(results, inference_case(mask, seqlen), name)) is not None
            ]
            if lines:
                header = ["method", "tokens", "R/C", "rho", "ms", "TFLOP", "TFLOP/s", "ours: times as fast"]
                parts += [f"### {mask}", markdown_table(header, lines)]
        parts.append(failures_of(results))
        tried = {(row.case, row.implementation) for row in results.rows}
        left_out = {
            _label(name): [
                f"{mask} {length_name(seqlen)}"
                for mask in MASKS
                for seqlen in LENGTHS
                if (inference_case(mask, seqlen), name) not in tried
            ]
            for name in (kernels, *PEERS)
        }
        parts.append(not_run(left_out, level=3))
    return document(parts)


def _label(name: str) -> str:
    return PEER_NAMES.get(name, "paddle_flashmask")


def _line(results: Results, case: Case, name: str) -> list[str] | None:
    label = _label(name)
    block = {"flashinfer_sparse": "64", "flashinfer_sparse_16": "16"}.get(name, "")
    found = results.find((case, "forward", name))
    if not found:
        failed = results.failed(case, "forward", name)
        return [label, length_name(case.seqlen), block, "", "failed", "", "", ""] if failed else None
    row = found[0]
    ratio = None if name == results.kernels else results.ratio(case, "forward", name)
    return [
        *(label, length_name(case.seqlen), block, f"{row.rho:.4f}", f"{row.milliseconds:.3f}"),
        *(f"{case.flops('forward', row.rho) / 1e12:.4f}", f"{row.tflops:.1f}"),
        "" if ratio is None else f"{ratio:.2f}",
    ]


def main() -> None:
    """Measure, then report."""
    arguments, command = parse_arguments()
    cases = [inference_case(mask, seqlen) for mask in arguments.masks for seqlen in arguments.lengths]
    share_compiled()
    if arguments.prepare is not None:
        prepare(cases, arguments.peers, arguments.prepare, backward=False)
        return
    check_ready(arguments, read_rows)
    if not arguments.report_only:
        from runner import Bench  # needs torch and a GPU; the report does not

        bench = Bench(arguments, command, read_rows(arguments.csv))
        for case in cases:
            if not bench.is_measured(case, "forward"):
                bench.measure(case, ["forward"])
    if arguments.no_report:
        return
    rows = read_rows(arguments.csv)
    if not any(row.run.kernels == arguments.kernels for row in rows):
        sys.exit(f"{arguments.csv}: no rows of {arguments.kernels}, nothing is written")
    text = render(rows, arguments.kernels)
    arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
    arguments.markdown.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
