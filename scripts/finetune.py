"""Fine-tune a small PaddleNLP Llama on packed question/answer documents, and prove the mask exact.

    python scripts/finetune.py --config configs/sft_tiny.json [--override max_steps=50 ...]

The text is one that every machine has: the docstrings of Python's standard library (question: a
function's or class's name and signature; answer: its docstring). The run is made twice from the same
seed, through the operator in production mode and through its dense-mask test mode; losses and final
weights must be the same bit for bit, or the script fails. It writes losses.csv, report.json and
losses.png to `output_dir`. The same command continues an interrupted run from its last checkpoint.
"""

from __future__ import annotations

import argparse
import ast
import csv
import difflib
import hashlib
import json
import logging
import shutil
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

# PaddleNLP and what it imports set off several, none about this script.
warnings.filterwarnings("ignore", module="paddle.*|datasets.*|jieba.*|_distutils_hack.*")

import paddle  # noqa: E402
from paddlenlp.trainer import (  # noqa: E402
    PdArgumentParser,
    PrinterCallback,
    TrainerCallback,
    get_last_checkpoint,
)
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from paddlenlp.transformers.configuration_utils import LlmMetaConfig  # noqa: E402
from paddlenlp.trl import SFTConfig, SFTTrainer  # noqa: E402
from paddlenlp.utils.log import logger  # noqa: E402

from paddle_flashmask.integrations import paddlenlp as integration  # noqa: E402
from paddle_flashmask.packing import PackedSequences, pack, sft_document  # noqa: E402

VISITS = {"skip": "FlashMask", "dense": "dense mask"}  # the operator's modes, and what the report calls them


@dataclass
class ModelArguments:
    """Size of the randomly initialised Llama; PaddleNLP's LlamaConfig names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int


@dataclass
class DataArguments:
    """How the text is used; the length of a packed sequence is SFTConfig's max_seq_length."""

    num_eval_documents: int = 100


SETTINGS = (ModelArguments, DataArguments, SFTConfig)  # every setting is a field of one of these

VALUES = {"int": int, "float": int | float, "bool": bool, "str": str}  # what JSON may hold for a field's type


class ByteTokenizer:
    """Text as UTF-8 bytes, and two tokens more. Nothing to download."""

    pad_token_id, eos_token_id, vocab_size = 256, 257, 258
    pad_token, eos_token = "<pad>", "</s>"
    padding_side = "right"
    chat_template = None

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, without special tokens."""
        return list(text.encode())

    def save_pretrained(self, directory: str, **_: Any) -> None:
        """Nothing to save: PaddleNLP's trainer asks for this beside every checkpoint."""


def standard_library_samples() -> Iterator[tuple[str, str]]:
    """(question, answer) for each documented class and function of the standard library, in a fixed order."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield from documented(ast.parse(path.read_bytes()), path.stem)


def documented(parent: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """The documented definitions inside `parent`, outer before inner, as (name and signature, docstring)."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            qualified = f"{name}.{node.name}"
            if docstring := ast.get_docstring(node):
                signature = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
                yield f"{qualified}{signature}\n", docstring
            yield from documented(node, qualified)


def load_data(
    tokenizer: ByteTokenizer, max_length: int, num_eval: int, seed: int
) -> tuple[PackedSequences, PackedSequences]:
    """The packed training and evaluation documents, shuffled by the seed."""
    documents = [
        sft_document(tokenizer.encode(question), [*tokenizer.encode(answer), tokenizer.eos_token_id])
        for question, answer in standard_library_samples()
    ]
    Random(seed).shuffle(documents)
    parts = []
    for name, part in (("training", documents[num_eval:]), ("evaluation", documents[:num_eval])):
        packed = pack(part, max_length, pad_token_id=tokenizer.pad_token_id)
        print(
            f"{name}: {len(part) - len(packed.skipped)} documents, {packed.num_tokens:,} tokens in "
            f"{len(packed)} sequences of {max_length}, {packed.fill_rate:.1%} full "
            f"({len(packed.skipped)} too long, skipped)"
        )
        parts.append(packed)
    return parts[0], parts[1]


class PackedDataset(paddle.io.Dataset):
    """Packed sequences as PaddleNLP's trainers want them."""

    def __init__(self, packed: PackedSequences) -> None:
        super().__init__()
        self.samples = integration.features(packed)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


class Recorder(TrainerCallback):
    """Writes loss, tokens and seconds of every step to a CSV file, and shows progress.

    Losses are written in full, not rounded as in the trainer's log: they are to be compared bit by bit.
    """

    COLUMNS = ("step", "loss", "tokens", "seconds")

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        kept = [row for row in read_curve(path) if row["step"] <= resumed_step] if resumed_step else []
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self.COLUMNS)
            writer.writerows([row[column] for column in self.COLUMNS] for row in kept)

    def on_step_begin(self, args: SFTConfig, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self.loss, self.tokens, self.started = 0.0, 0, time.perf_counter()

    def add(self, loss: float, tokens: int) -> None:
        """Count one micro-batch of the step."""
        self.loss += loss
        self.tokens += tokens

    def on_step_end(self, args: SFTConfig, state: Any, control: Any, **_: Any) -> None:
        """Write the step's row; print it every `logging_steps`."""
        seconds = time.perf_counter() - self.started
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow([state.global_step, self.loss, self.tokens, seconds])
        if state.global_step % args.logging_steps == 0 or state.global_step in (1, args.max_steps):
            print(
                f"  step {state.global_step:4d}/{args.max_steps}   loss {self.loss:.4f}   "
                f"{self.tokens / seconds:8,.0f} tokens/s",
                flush=True,
            )


class RecordingTrainer(SFTTrainer):
    """PaddleNLP's SFT trainer, with a Recorder in place of its own log lines."""

    def __init__(self, recorder: Recorder, **options: Any) -> None:
        super().__init__(**options)
        self.recorder = recorder
        self.add_callback(recorder)
        self.remove_callback(PrinterCallback)

    def training_step(self, model: Any, inputs: dict[str, Any], step_control: int = 0) -> paddle.Tensor:
        """One micro-batch, reported to the recorder."""
        tokens = int((inputs[integration.INDICES] > 0).sum())  # padding columns start at row 0
        loss = super().training_step(model, inputs, step_control)
        self.recorder.add(float(loss), tokens)
        return loss


def parse(settings: dict[str, Any]) -> tuple[ModelArguments, DataArguments, SFTConfig]:
    """The settings as dataclasses."""
    return PdArgumentParser(SETTINGS).parse_dict(dict(settings) | {"disable_tqdm": True, "report_to": []})


def build_model(model_args: ModelArguments, args: SFTConfig, tokenizer: ByteTokenizer) -> LlamaForCausalLM:
    """A Llama with random weights that depend on the seed alone."""
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=args.max_seq_length, **asdict(model_args)
    )
    LlmMetaConfig.set_llm_config(config, args)
    paddle.seed(args.seed)
    return LlamaForCausalLM(config)


def train(
    visit: str, settings: dict[str, Any], train_set: PackedSequences, eval_set: PackedSequences
) -> dict[str, Any]:
    """One whole run, or the rest of an interrupted one; returns what result.json holds."""
    directory = Path(settings["output_dir"]) / visit
    result_path = directory / "result.json"
    if result_path.exists():
        print(f"\n{VISITS[visit]}: finished before, see {result_path}")
        return json.loads(result_path.read_text())
    directory.mkdir(parents=True, exist_ok=True)
    model_args, _, args = parse(settings | {"output_dir": str(directory)})
    checkpoint, resumed_step = last_checkpoint(directory, args.max_steps)
    tokenizer = ByteTokenizer()
    # Checkpoints hold the optimizer's state by parameter name: the guard names them as in a fresh process.
    with paddle.utils.unique_name.guard(), integration.enable(visit) as switch:
        model = build_model(model_args, args, tokenizer)
        size = sum(parameter.size for parameter in model.parameters())
        print(f"\n{VISITS[visit]}: {size:,} parameters, from step {resumed_step}")
        trainer = RecordingTrainer(
            Recorder(directory / "curve.csv", resumed_step),
            model=model,
            args=args,
            train_dataset=PackedDataset(train_set),
            eval_dataset=PackedDataset(eval_set),
            data_collator=integration.collate,
            tokenizer=tokenizer,
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        mask_bytes = switch.mask_bytes
        eval_loss = trainer.evaluate()["eval_loss"]
    print(f"  evaluation loss {eval_loss:.4f}")
    weights = hashlib.sha256()
    for _, parameter in sorted(model.state_dict().items()):
        weights.update(parameter.numpy().tobytes())
    result = {"mask_bytes": mask_bytes, "eval_loss": eval_loss, "weights_sha256": weights.hexdigest()}
    result_path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def last_checkpoint(directory: Path, max_steps: int) -> tuple[str | None, int]:
    """The last checkpoint before `max_steps`, and its step; (None, 0) without one.

    One at `max_steps` is deleted: PaddleNLP's trainer would resume it with one step too many.
    """
    while checkpoint := get_last_checkpoint(str(directory)):
        step = int(checkpoint.rsplit("-", 1)[1])
        if step < max_steps:
            return checkpoint, step
        shutil.rmtree(checkpoint)
    return None, 0


def read_curve(path: Path) -> list[dict[str, float]]:
    """The rows of a Recorder's file."""
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def report(directory: Path, results: dict[str, dict[str, Any]]) -> bool:
    """Print and write the comparison of the two runs; True if they are the same bit for bit."""
    curves = {visit: read_curve(directory / visit / "curve.csv") for visit in VISITS}
    skip, dense = curves["skip"], curves["dense"]
    speed = {visit: median(row["tokens"] / row["seconds"] for row in curves[visit]) for visit in VISITS}
    same = {
        "losses": [row["loss"] for row in skip] == [row["loss"] for row in dense],
        "evaluation loss": results["skip"]["eval_loss"] == results["dense"]["eval_loss"],
        "final weights": results["skip"]["weights_sha256"] == results["dense"]["weights_sha256"],
    }

    print(f"\n{'':25} {VISITS['skip']:>16}{VISITS['dense']:>16}")
    for before, after in zip(skip, dense, strict=True):
        if before["step"] in (1, len(skip)) or before["step"] % max(1, len(skip) // 10) == 0:
            print(
                f"{'loss at step':>20} {int(before['step']):4d} {before['loss']:16.6f}{after['loss']:16.6f}"
            )
    for name, values, format_ in (
        ("evaluation loss", {visit: results[visit]["eval_loss"] for visit in VISITS}, ".6f"),
        ("tokens/s (median step)", speed, ",.0f"),
        ("bytes of mask per batch", {visit: results[visit]["mask_bytes"] for visit in VISITS}, ",d"),
    ):
        print(f"{name:25} {values['skip']:>16{format_}}{values['dense']:>16{format_}}")
    for name, equal in same.items():
        print(f"{name:25} {'identical bit for bit' if equal else 'DIFFERENT':>32}")

    with (directory / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss_skip", "loss_dense", "tokens", "seconds_skip", "seconds_dense"])
        for a, b in zip(skip, dense, strict=True):
            writer.writerow(
                [int(a["step"]), a["loss"], b["loss"], int(a["tokens"]), a["seconds"], b["seconds"]]
            )
    summary = {"runs": results, "tokens_per_second": speed, "identical": same}
    (directory / "report.json").write_text(json.dumps(summary, indent=2) + "\n")
    drawn = plot(directory / "losses.png", curves)
    print(f"\nwritten to {directory}: losses.csv, report.json" + (", losses.png" if drawn else ""))
    return all(same.values())


def plot(path: Path, curves: dict[str, list[dict[str, float]]]) -> bool:
    """Draw both loss curves in one picture; False without matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for (visit, label), style in zip(VISITS.items(), ("-", "--"), strict=True):
        rows = curves[visit]
        axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], style, label=label)
    axes.set(xlabel="step", ylabel="training loss", title="The same run with and without tile skipping")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def read_settings(config: Path, overrides: list[str]) -> dict[str, Any]:
    """The configuration's settings, some of them replaced by "KEY=VALUE" (JSON, or else the text itself).

    Raises:
        ValueError: one line about a file, a key or an override that cannot be used.
    """
    try:
        settings = json.loads(config.read_text())
    except OSError as error:
        raise ValueError(f"--config: {config} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--config: {config} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"--config: {config}: expected one JSON object, got {type(settings).__name__}")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"--override: expected KEY=VALUE, got {override!r}")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    known = {field.name: field for type_ in SETTINGS for field in fields(type_)}
    for key, value in settings.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"unknown setting {key!r}{hint}")
        kind = getattr(known[key].type, "__name__", known[key].type)  # the name where annotations are strings
        if value != known[key].default and not isinstance(value, VALUES.get(kind, object)):
            raise ValueError(f"setting {key}: expected {kind}, got {json.dumps(value)}")
    needed = [name for name, field in known.items() if field.default is field.default_factory is MISSING]
    if missing := [name for name in [*needed, "output_dir"] if name not in settings]:
        raise ValueError(f"--config: {config} lacks {', '.join(dict.fromkeys(missing))}")
    return settings


def prepare_output(settings: dict[str, Any]) -> Path:
    """The output folder: emptied after a finished run, kept to continue an interrupted one."""
    directory = Path(settings["output_dir"])
    if (directory / "report.json").exists():
        (directory / "report.json").unlink()
        for visit in VISITS:
            shutil.rmtree(directory / visit, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    copy = directory / "config.json"
    started = any((directory / visit).exists() for visit in VISITS)
    if started and json.loads(copy.read_text()) != settings:
        raise SystemExit(
            f"{directory} holds an interrupted run with other settings ({copy}): "
            "delete it, or choose another folder with --override output_dir=..."
        )
    copy.write_text(json.dumps(settings, indent=2) + "\n")
    return directory


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if the two runs agree bit for bit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="JSON file, PaddleNLP's argument names")
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="replace one setting; repeatable"
    )
    options = parser.parse_args(arguments)
    try:
        settings = read_settings(options.config, options.override)
    except ValueError as error:
        parser.error(str(error))

    logger.set_level("ERROR")
    _, data_args, args = parse(settings)
    directory = prepare_output(settings)
    train_set, eval_set = load_data(
        ByteTokenizer(), args.max_seq_length, data_args.num_eval_documents, args.seed
    )
    results = {visit: train(visit, settings, train_set, eval_set) for visit in VISITS}
    return 0 if report(directory, results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
