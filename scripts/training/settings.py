"""Settings: JSON files whose keys are fields of the dataclasses here and of PaddleNLP's SFTConfig."""

from __future__ import annotations

import difflib
import json
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from paddlenlp.trainer import PdArgumentParser
from paddlenlp.trl import SFTConfig

TASKS = {
    "sft": "supervised fine-tuning",
    "lora": "supervised fine-tuning of low-rank adapters",
    "dpo": "direct preference optimisation",
    "rm": "reward modelling",
}
ATTENTION = {
    "flashmask": "FlashMask",
    "dense_mask": "dense mask",  # the operator's test mode: a dense boolean mask is read and no tile skipped
    "paddle": "Paddle's dense",  # PaddleNLP's attention without this package, with a dense mask
}


@dataclass
class ModelArguments:
    """A folder with a model that PaddleNLP saved, or the size of a random Llama (LlamaConfig's names)."""

    model_name_or_path: str = ""
    tokenizer_name_or_path: str = ""  # empty: bytes
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0


@dataclass
class DataArguments:
    """JSONL files; without them, Python's docstrings. They are packed to SFTConfig's max_seq_length."""

    train_file: str = ""
    eval_file: str = ""  # empty: the first num_eval_documents of the shuffled training samples, held out
    num_eval_documents: int = 100


@dataclass
class TaskArguments:
    """What is trained, and through which attention: one run for each."""

    task: str
    attention: list[str] = field(default_factory=lambda: ["flashmask"])


@dataclass
class LoraArguments:
    """PaddleNLP's names."""

    lora_rank: int = 8
    lora_alpha: int = 16


@dataclass
class DPOArguments:
    """What PaddleNLP's DPOTrainer reads; its own class of these is not in its wheel."""

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    dpop_lambda: float = 50.0
    pref_loss_ratio: float = 1.0
    sft_loss_ratio: float = 0.0
    reference_free: bool = False
    ref_model_update_steps: int = -1
    lora: bool = False  # train adapters, as task "lora" does


@dataclass
class Settings:
    """All of them; every key of a configuration is a field of one of these."""

    model: ModelArguments
    data: DataArguments
    task: TaskArguments
    lora: LoraArguments
    dpo: DPOArguments
    training: SFTConfig


TYPES = (ModelArguments, DataArguments, TaskArguments, LoraArguments, DPOArguments, SFTConfig)
VALUES = {"int": int, "float": int | float, "bool": bool, "str": str}  # in JSON, by type
SIZES = tuple(f.name for f in fields(ModelArguments) if f.type == "int")


def parse(settings: dict[str, Any]) -> Settings:
    """The settings as dataclasses."""
    quiet = {"disable_tqdm": True, "report_to": []}
    return Settings(*PdArgumentParser(TYPES).parse_dict(settings | quiet))


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
    known = {field.name: field for type_ in TYPES for field in fields(type_)}
    for key, value in settings.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"unknown setting {key!r}{hint}")
        kind = getattr(known[key].type, "__name__", known[key].type)  # the name where annotations are strings
        if value != known[key].default and not isinstance(value, VALUES.get(kind, object)):
            raise ValueError(f"setting {key}: expected {kind}, got {json.dumps(value)}")
    needed = [name for name, field in known.items() if field.default is field.default_factory is MISSING]
    sizes = () if settings.get("model_name_or_path") else SIZES
    if missing := [name for name in [*needed, *sizes, "output_dir"] if name not in settings]:
        raise ValueError(f"--config: {config} lacks {', '.join(dict.fromkeys(missing))}")
    _check_values(settings)
    return settings


def _check_values(settings: dict[str, Any]) -> None:
    if settings["task"] not in TASKS:
        raise ValueError(f"setting task: expected one of {', '.join(TASKS)}, got {settings['task']!r}")
    attention = settings.get("attention", ["flashmask"])
    if not (isinstance(attention, list) and attention and all(name in ATTENTION for name in attention)):
        raise ValueError(
            f"setting attention: expected a list, some of {', '.join(ATTENTION)}, got {json.dumps(attention)}"
        )
    sizes = () if settings.get("model_name_or_path") else SIZES
    for key in (*sizes, "max_seq_length", "num_eval_documents"):
        if settings.get(key, 1) < 1:
            raise ValueError(f"setting {key}: expected at least 1, got {settings[key]}")
    heads, kv_heads = "num_attention_heads", "num_key_value_heads"
    for key, divisor in (("hidden_size", heads), (heads, kv_heads)) if sizes else ():
        if settings[key] % settings[divisor]:
            raise ValueError(
                f"setting {key}: expected a multiple of {divisor}, {settings[divisor]}, got {settings[key]}"
            )
    folders = {"model_name_or_path": "config.json", "tokenizer_name_or_path": "tokenizer_config.json"}
    for key, file in folders.items():
        if settings.get(key) and not Path(settings[key]).is_dir():
            raise ValueError(f"setting {key}: no such folder: {settings[key]}")
        if settings.get(key) and not Path(settings[key], file).is_file():
            raise ValueError(f"setting {key}: no {file} in {settings[key]}")
    if Path(settings["output_dir"]).is_file():
        raise ValueError(f"setting output_dir: expected a folder, got a file: {settings['output_dir']}")
    for key in ("train_file", "eval_file"):
        if settings.get(key) and not Path(settings[key]).is_file():
            raise ValueError(f"setting {key}: no such file: {settings[key]}")
