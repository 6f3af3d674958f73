"""Benchmark the CUDA kernels on the paper's twelve masks, in turns with other attentions.

python scripts/build_kernels.py --cuda --targets 90 --subset benchmark --output build
python scripts/bench/kernels.py --quick                                   # one table in under a minute
python scripts/bench/kernels.py --deterministic --bars --resume           # ours alone, everything
python scripts/bench/kernels.py --peers flex flex_flash fa4 cudnn --lengths 8192 --head-dims 128 --resume
python scripts/bench/kernels.py --peers fa4 cudnn --masks full causal --lengths 8192 --head-dims 256 --resume
python scripts/bench/kernels.py --setting magi --peers fa4 cudnn flex_flash --resume
python scripts/bench/kernels.py --kernels sm80 --report-only              # kernels_sm80.md and its figures

The paper's setting: bfloat16, 128 K tokens in all, heads times head dim = 4096. Needs torch with CUDA, and no
Paddle. Rows are appended to a CSV file as soon as a case is measured; --resume leaves out what an earlier run
has measured with the same kernel sources on the same card beside the same peers. Of the default file the page
beside it and the figures in docs/images are written too, unless --no-report is given; --quick writes neither.
The bars come last: for sm90 those beside FA4, FlexAttention, cuDNN and the anchors of hopper_bars.py.

What it takes on an H200, --seconds 0.12 --rounds 0, one head dim, twelve masks, ours alone: 25 s at 8 K
tokens, 30 s at 32 K, 75 s at 128 K (measured with the portable kernels; the Hopper ones are faster). fa4 and
cudnn run few masks. flex and flex_flash compile 10 to 30 s per mask and shape: 4 to 12 minutes for twelve,
each. So let them compile on many cores first; this needs no library of ours, and the measurement finds what
they compiled:
    python scripts/bench/kernels.py --prepare --peers flex flex_flash fa4 --lengths 8192 32768
On a host of several GPUs, tables.sh beside this file gives each shape its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import report
from cells import (
    DIRECTIONS,
    HEAD_DIMS,
    LENGTHS,
    MAGI_HEADS,
    MAGI_KV_HEADS,
    MAGI_LENGTHS,
    MAGI_MASKS,
    MAGI_WINDOW,
    PUBLISHED_TWELVE,
    ROOT,
    ROUNDS,
    TRAINING_PEERS,
    TWELVE,
    Case,
    Row,
    is_drawn,
    long_cases,
    magi_case,
    masking_cases,
    paper_case,
    plan,
    read_rows,
    search_case,
)
from paper_data import PUBLISHED
from prepare import add_prepare_argument, prepare, share_compiled
from provenance import can_draw, check_ready, count, recorded_command, with_figures
from results import name_in_files

QUICK_SECONDS = 0.25
SETTING_MASKS = {"paper": TWELVE, "published": PUBLISHED_TWELVE, "magi": MAGI_MASKS}


def parse_arguments() -> tuple[argparse.Namespace, str]:
    """Return the arguments, and the command that they make, as it is recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    families = ["sm80", "sm90", "cuda"]
    parser.add_argument(
        "--kernels", default="cuda", choices=families, help="which of ours; cuda: the best on the device"
    )
    parser.add_argument("--peers", nargs="*", default=[], choices=TRAINING_PEERS)
    parser.add_argument(
        "--setting",
        default="paper",
        choices=["paper", "published", "magi"],
        help="published: five samples, three masks with the sparsity of the paper's tables; "
        f"magi: one sample, {MAGI_HEADS}:{MAGI_KV_HEADS} heads, visible area counted exactly",
    )
    known = [*TWELVE, *PUBLISHED, MAGI_WINDOW]
    parser.add_argument("--masks", nargs="*", choices=known, help="default: all of the setting")
    parser.add_argument("--lengths", nargs="+", type=count, help="default: all of the setting")
    parser.add_argument("--head-dims", nargs="+", type=count, help="default: 64 128, magi: 128")
    parser.add_argument("--directions", nargs="+", default=list(DIRECTIONS), choices=DIRECTIONS)
    parser.add_argument(
        "--seeds", nargs="+", type=int, help="of documents and tensors; default: 0, published: 0 1 2 3 4"
    )
    parser.add_argument("--deterministic", action="store_true", help="our deterministic backward too")
    parser.add_argument(
        "--bars", action="store_true", help="also the cases of the search, masking and memory bars"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.5,
        help="per implementation, case and direction; 1 at least where the search for tiles is timed",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        metavar="N",
        help="warm-ups (10 at most) and repetitions at least, where one of all implementations takes up to a "
        "second; 0: 2 and 5, as --quick has it (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"8192 tokens, D=128, beside FA2, {QUICK_SECONDS} seconds each"
    )
    parser.add_argument(
        "--library", dest="binary", type=Path, default=ROOT / "build" / "libflashmask_cuda.so"
    )
    parser.add_argument(
        "--csv", type=Path, help="default: docs/results/kernels_<kernels>.csv, published: ..._published.csv"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what the CSV file has")
    parser.add_argument("--commit", help="recorded with the rows; by default git is asked")
    add_prepare_argument(parser)
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    parser.add_argument(
        "--markdown",
        type=Path,
        help="write everything in the CSV file to this document; default: the default file's name, .md",
    )
    parser.add_argument(
        "--charts",
        type=Path,
        help="draw bar charts of the CSV file into this folder; default: docs/images for the default file",
    )
    parser.add_argument("--no-report", action="store_true", help="write neither document nor charts")
    arguments = parser.parse_args()

    command = recorded_command("kernels.py", parser, arguments)

    magi = arguments.setting == "magi"
    arguments.masks = arguments.masks or list(SETTING_MASKS[arguments.setting])
    arguments.seeds = arguments.seeds or (list(range(5)) if arguments.setting == "published" else [0])
    arguments.lengths = arguments.lengths or list(MAGI_LENGTHS if magi else LENGTHS)
    arguments.head_dims = arguments.head_dims or ([128] if magi else list(HEAD_DIMS))
    if arguments.quick:
        arguments.lengths, arguments.head_dims, arguments.seconds = [8192], [128], QUICK_SECONDS
        arguments.rounds = 0
        arguments.peers = arguments.peers or ["fa2"]
    suffix = "_published" if arguments.setting == "published" else ""
    committed = ROOT / "docs" / "results" / f"kernels_{arguments.kernels}{suffix}.csv"
    if arguments.csv is None:
        arguments.csv = ROOT / "outputs" / committed.name if arguments.quick else committed
    if arguments.no_report:
        arguments.markdown = arguments.charts = None
    elif arguments.csv.resolve() == committed.resolve() and not arguments.quick:
        arguments.markdown = arguments.markdown or committed.with_suffix(".md")
        arguments.charts = arguments.charts or ROOT / "docs" / "images"
    return arguments, command


def wanted_cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that the arguments name; masks of one shape follow each other and share tensors."""
    make = magi_case if arguments.setting == "magi" else paper_case
    cases = [
        make(mask, seqlen, head_dim, seed)
        for head_dim in arguments.head_dims
        for seqlen in arguments.lengths
        for seed in arguments.seeds
        for mask in SETTING_MASKS[arguments.setting]
        if mask in arguments.masks and (seed == arguments.seeds[0] or is_drawn(mask))
    ]
    if arguments.bars:
        cases += [case for head_dim in HEAD_DIMS for pair in masking_cases(head_dim) for case in pair]
        cases += [*map(search_case, HEAD_DIMS), *long_cases()]
    return cases


def write_report(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Write the figures and the document, of those that are wanted."""
    figures: list[Path] = []
    if arguments.charts is not None and can_draw(arguments.charts):
        import charts

        for number, card in enumerate(report.cards(rows, arguments.kernels)):
            suffix = f"_{name_in_files(card)}" if number else ""
            figures += charts.draw(report.Results(rows, arguments.kernels, card), arguments.charts, suffix)
        print(*figures, sep="\n")
    if arguments.markdown is not None:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        text = report.render(rows, arguments.kernels, published=arguments.setting == "published")
        arguments.markdown.write_text(with_figures(text, arguments.markdown, figures))


def main() -> None:
    """Measure, then report."""
    arguments, command = parse_arguments()
    cards = None
    share_compiled()
    if arguments.prepare is not None:
        backward = "backward" in arguments.directions
        prepare(wanted_cases(arguments), arguments.peers, arguments.prepare, backward=backward)
        return
    check_ready(arguments, read_rows)
    if not arguments.report_only:
        from runner import Bench  # needs torch and a GPU; the report does not

        bench = Bench(arguments, command, read_rows(arguments.csv) if arguments.resume else [])
        cards = [bench.run.card]
        for case, directions in plan(wanted_cases(arguments), bench.is_measured, arguments.directions):
            bench.measure(case, directions)

    rows = read_rows(arguments.csv)
    if not report.cards(rows, arguments.kernels):
        sys.exit(f"{arguments.csv}: no rows of {arguments.kernels}, nothing is written")
    published = arguments.setting == "published"
    writes = arguments.markdown is not None or arguments.charts is not None
    if published and writes and not any(row.case.mask in PUBLISHED for row in rows):
        sys.exit(f"{arguments.csv}: no rows of the published setting, nothing is written")
    write_report(arguments, rows)
    if published:
        return  # the bars are of the other setting
    for card in cards or report.cards(rows, arguments.kernels):
        results = report.Results(rows, arguments.kernels, card)
        tables = [*report.mask_tables(results)] if arguments.quick else []
        if report.is_hopper(results):
            tables += report.hopper_bars.mask_ratios(results)
        print("", card, *tables, report.render_bars(results, measured_only=arguments.quick), sep="\n\n")


if __name__ == "__main__":
    main()
