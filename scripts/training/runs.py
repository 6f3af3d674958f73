"""One training run: every step's metrics in a CSV file, progress, checkpoints and resuming."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import shutil
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import paddle
from paddlenlp.trainer import PrinterCallback, TrainerCallback, get_last_checkpoint

from paddle_flashmask.integrations import paddlenlp as integration
from paddle_flashmask.packing import PackedSequences

from .settings import ATTENTION, parse
from .tasks import TRAINERS, PackedDataset, build_task, count_tokens, dense_collate

VISITS = {"flashmask": "skip", "dense_mask": "dense"}  # the operator's modes


class Recorder(TrainerCallback):
    """Writes loss, accuracy, tokens and seconds of every step to a CSV file, and shows progress.

    Losses are written in full, not rounded as in the trainer's log: they are to be compared bit by bit.
    Accuracy is of preferences, and empty for tasks without any.
    """

    COLUMNS = ("step", "loss", "accuracy", "tokens", "seconds")

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        kept = [row for row in read_curve(path) if row["step"] <= resumed_step] if resumed_step else []
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self.COLUMNS)
            writer.writerows([row[column] for column in self.COLUMNS] for row in kept)

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
        """Shuffle for the epochs before a checkpoint: the trainer skips batches of the one it is in only."""
        steps_per_epoch = max(len(train_dataloader) // args.gradient_accumulation_steps, 1)
        for _epoch in range(state.global_step // steps_per_epoch):
            for _batch in train_dataloader:
                pass

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self.loss, self.tokens, self.started = 0.0, 0, time.perf_counter()
        self.accuracies: list[float] = []

    def add(self, loss: float, tokens: int, accuracy: float | None) -> None:
        """Count one micro-batch of the step."""
        self.loss += loss
        self.tokens += tokens
        if accuracy is not None:
            self.accuracies.append(accuracy)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the step's row; print it every `logging_steps`."""
        seconds = time.perf_counter() - self.started
        accuracy = fmean(self.accuracies) if self.accuracies else ""
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow([state.global_step, self.loss, accuracy, self.tokens, seconds])
        if state.global_step % args.logging_steps == 0 or state.global_step in (1, args.max_steps):
            print(
                f"  step {state.global_step:4d}/{args.max_steps}   loss {self.loss:.4f}   "
                + (f"accuracy {accuracy:4.0%}   " if accuracy != "" else "")
                + f"{self.tokens / seconds:8,.0f} tokens/s",
                flush=True,
            )


def recording(trainer_class: Any, recorder: Recorder, **options: Any) -> Any:
    """A trainer of this class with a Recorder in place of its own log lines."""

    class RecordingTrainer(trainer_class):
        def training_step(self, model: Any, inputs: dict[str, Any], step_control: int = 0) -> paddle.Tensor:
            tokens = count_tokens(inputs)
            loss = super().training_step(model, inputs, step_control)
            recorder.add(float(loss), tokens, getattr(self, "accuracy", None))
            return loss

    trainer = RecordingTrainer(**options)
    trainer.add_callback(recorder)
    trainer.remove_callback(PrinterCallback)
    return trainer


def read_curve(path: Path) -> list[dict[str, Any]]:
    """The rows of a Recorder's file: numbers, and empty text where there is none."""
    with path.open(newline="") as file:
        return [
            {name: float(value) if value else value for name, value in row.items()}
            for row in csv.DictReader(file)
        ]


def train(
    attention: str,
    settings: dict[str, Any],
    train_set: PackedSequences,
    eval_set: PackedSequences,
    tokenizer: Any,
) -> dict[str, Any]:
    """One whole run, or the rest of an interrupted one; returns what result.json holds.

    In `output_dir`/`attention` it leaves curve.csv, result.json, checkpoints and, in `model`, the trained
    model (for LoRA the adapters).
    """
    directory = Path(settings["output_dir"]) / attention
    result_path = directory / "result.json"
    if result_path.exists():
        print(f"\n{ATTENTION[attention]}: finished before, see {result_path}")
        return json.loads(result_path.read_text())
    directory.mkdir(parents=True, exist_ok=True)
    visit = VISITS.get(attention)
    parsed = parse(settings | {"output_dir": str(directory), "use_flash_attention": visit is not None})
    task, args = parsed.task.task, parsed.training
    checkpoint, resumed_step = last_checkpoint(directory, args.max_steps)
    switch = integration.enable(visit) if visit else None
    # Checkpoints hold the optimizer's state by parameter name: the guard names them as in a fresh process.
    with paddle.utils.unique_name.guard(), switch or contextlib.nullcontext():
        model, options = build_task(parsed, len(tokenizer))
        trained = sum(p.size for p in model.parameters() if not p.stop_gradient)
        print(f"\n{ATTENTION[attention]}: {trained:,} trained parameters, from step {resumed_step}")
        trainer = recording(
            TRAINERS[task],
            Recorder(directory / "curve.csv", resumed_step),
            model=model,
            args=args,
            train_dataset=PackedDataset(task, train_set),
            eval_dataset=PackedDataset(task, eval_set),
            data_collator=integration.collate if visit else dense_collate,
            tokenizer=tokenizer,
            **options,
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        dense_bytes = args.per_device_train_batch_size * args.max_seq_length**2
        mask_bytes = switch.mask_bytes if switch else dense_bytes
        result = {"mask_bytes": mask_bytes, "eval_loss": trainer.evaluate()["eval_loss"]}
        trainer.save_model(str(directory / "model"))
        if attention == "flashmask" and "paddle" in parsed.task.attention:
            result["eval_loss_paddle"] = evaluate_densely(trainer)
    print(f"  evaluation loss {result['eval_loss']:.4f}")
    weights = hashlib.sha256()
    for _, parameter in sorted(model.state_dict().items()):
        weights.update(parameter.numpy().tobytes())
    result["weights_sha256"] = weights.hexdigest()
    result_path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def evaluate_densely(trainer: Any) -> float:
    """The evaluation loss of the trained weights, through PaddleNLP's own dense attention."""
    for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        model.config.use_flash_attention = False
    trainer.data_collator = dense_collate
    return trainer.evaluate()["eval_loss"]


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
