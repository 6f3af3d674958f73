"""Fine-tune a PaddleNLP Llama on packed samples: SFT, LoRA, DPO or a reward model.

    python scripts/finetune.py --config configs/sft_tiny.json [--override max_steps=50 ...]

Settings are listed in scripts/training/settings.py, forms of JSONL files in scripts/training/samples.py.
Without files the text is one that every machine has: the docstrings of Python's standard library.

With several names in the setting `attention`, the run is repeated from the same seed through each:
"flashmask" is production, "dense_mask" the operator's test mode, "paddle" PaddleNLP's own dense attention.
Losses and final weights of the first two must be the same bit for bit, or the script fails.

It writes losses.csv, report.json and losses.png to `output_dir`, and each trained model beside its
checkpoints. The same command continues an interrupted run from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import warnings
from pathlib import Path
from random import Random
from typing import Any

# PaddleNLP and what it imports set off several, none about this script.
warnings.filterwarnings("ignore", module="paddle.*|datasets.*|jieba.*|_distutils_hack.*")

from paddlenlp.transformers import AutoTokenizer  # noqa: E402
from paddlenlp.utils.log import logger  # noqa: E402
from training.report import report  # noqa: E402
from training.runs import train  # noqa: E402
from training.samples import ByteTokenizer, build_rows, pack_rows, read_rows  # noqa: E402
from training.settings import ATTENTION, Settings, parse, read_settings  # noqa: E402

from paddle_flashmask.packing import PackedSequences  # noqa: E402


def load_tokenizer(folder: str) -> Any:
    """PaddleNLP's tokenizer of a folder, or bytes without one."""
    if not folder:
        return ByteTokenizer()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # what PaddleNLP's SFTTrainer does; padding has no loss
    return tokenizer


def load_data(settings: Settings, tokenizer: Any) -> tuple[PackedSequences, PackedSequences]:
    """The packed training and evaluation samples, shuffled by the seed.

    Raises:
        ValueError: a file or a row that cannot be used.
    """
    data, task, args = settings.data, settings.task.task, settings.training
    rows = read_rows(Path(data.train_file)) if data.train_file else list(build_rows(task))
    Random(args.seed).shuffle(rows)
    if data.eval_file:
        held_out = read_rows(Path(data.eval_file))
    else:
        held_out, rows = rows[: data.num_eval_documents], rows[data.num_eval_documents :]
    return (
        pack_rows("training", task, rows, tokenizer, args.max_seq_length),
        pack_rows("evaluation", task, held_out, tokenizer, args.max_seq_length),
    )


def count_steps(settings: Settings, num_sequences: int) -> int:
    """`max_steps`, or without it the steps that PaddleNLP's trainer takes in `num_train_epochs`."""
    args = settings.training
    if args.max_steps > 0:
        return args.max_steps
    batches = math.ceil(num_sequences / args.per_device_train_batch_size)
    return max(int(max(batches // args.gradient_accumulation_steps, 1) * args.num_train_epochs), 1)


def prepare_output(settings: dict[str, Any]) -> Path:
    """The output folder: emptied after a finished run, kept to continue an interrupted one."""
    directory = Path(settings["output_dir"])
    if (directory / "report.json").exists():
        (directory / "report.json").unlink()
        for name in ATTENTION:
            shutil.rmtree(directory / name, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    copy = directory / "config.json"
    started = any((directory / name).exists() for name in ATTENTION)
    if started and json.loads(copy.read_text()) != settings:
        raise SystemExit(
            f"{directory} holds an interrupted run with other settings ({copy}): "
            "delete it, or choose another folder with --override output_dir=..."
        )
    copy.write_text(json.dumps(settings, indent=2) + "\n")
    return directory


def run(settings: dict[str, Any]) -> bool:
    """Train as the settings say; False if two runs that must agree bit for bit do not.

    Raises:
        ValueError: a file or a row that cannot be used.
    """
    parsed = parse(settings)
    tokenizer = load_tokenizer(parsed.model.tokenizer_name_or_path)
    train_set, eval_set = load_data(parsed, tokenizer)
    settings = settings | {"max_steps": count_steps(parsed, len(train_set))}
    directory = prepare_output(settings)
    results = {name: train(name, settings, train_set, eval_set, tokenizer) for name in parsed.task.attention}
    return report(directory, results)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 unless runs that must agree bit for bit do not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="JSON file, PaddleNLP's argument names")
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="replace one setting; repeatable"
    )
    options = parser.parse_args(arguments)
    logger.set_level("ERROR")
    try:
        return 0 if run(read_settings(options.config, options.override)) else 1
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
