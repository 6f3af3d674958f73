"""The paper's settings, configs/paper: its two tables, restated here, and the frameworks' own parsers."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

PAPER = Path(__file__).parents[2] / "configs" / "paper"
TASKS = {"paddlenlp": ("sft", "lora", "dpo", "rm"), "paddleformers": ("sft", "lora", "dpo")}
# "Hyperparameters and distributed configurations for various scales of Llama2 models", on 32 GPUs: batch
# size, accumulation steps, sharding stage 1 degree, tensor and pipeline parallel degrees.
LLAMA2 = {
    "llama2_7b": (16, 2, 8, 4, 1),
    "llama2_13b": (16, 4, 4, 4, 2),
    "llama2_70b": (16, 16, 1, 8, 4),
}
# "The configuration of end-to-end training loss convergence verification", Llama 3.1 8B: learning rate,
# steps, epochs, batch size, accumulation steps, GPUs, sharding and tensor parallel degrees.
LLAMA31 = {
    "sft": (2e-5, 12000, 3, 16, 1, 32, 16, 2),
    "lora": (2e-4, 12000, 3, 16, 1, 32, 16, 2),
    "dpo": (5e-7, 4000, 2, 4, 2, 8, 2, 4),
    "rm": (1e-5, 4000, 2, 4, 1, 8, 4, 2),
}
# PaddleNLP's keys, and PaddleFormers'.
DEGREES = {
    "paddlenlp": ("sharding_parallel_degree", "tensor_parallel_degree", "pipeline_parallel_degree"),
    "paddleformers": ("sharding_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
}
# Keys of PaddleNLP's llm/alignment/dpo/dpo_argument.py and rm/flashmask/reward_argument.py beside its
# trainer's: they are in its repository, not in its wheel.
ALIGNMENT_KEYS = {
    "model_name_or_path",
    "train_dataset_path",
    "dev_dataset_path",
    "max_seq_len",
    "max_prompt_len",
    "greedy_zero_padding",
    "use_flash_attention",
    "flash_mask",
    "recompute_granularity",
    "sequence_parallel",
}
# What a trainer without other processes leaves out.
LOST_ON_ONE_DEVICE = {name for names in DEGREES.values() for name in names} | {
    "sharding",
    "sequence_parallel",
}


def configs(framework):
    models = (*LLAMA2, "llama3.1_8b")
    return [pytest.param(model, task, id=f"{model}-{task}") for model in models for task in TASKS[framework]]


def read(framework, model, task):
    return json.loads((PAPER / framework / model / f"{task}.json").read_text())


def test_there_are_no_other_files():
    wanted = {
        f"{framework}/{model}/{task}.json"
        for framework, tasks in TASKS.items()
        for model in (*LLAMA2, "llama3.1_8b")
        for task in tasks
    }
    assert {str(path.relative_to(PAPER)) for path in PAPER.rglob("*.json")} == wanted


@pytest.mark.parametrize("framework", TASKS)
def test_the_files_say_what_the_tables_say(framework):
    sharding, tensor, pipeline = DEGREES[framework]
    for model in (*LLAMA2, "llama3.1_8b"):
        for task in TASKS[framework]:
            config = read(framework, model, task)
            if model in LLAMA2:
                batch, accumulation, *degrees = LLAMA2[model]
                gpus = 32
                assert config["sequence_parallel"]
                assert config["recompute_granularity"] == "full"
                assert "learning_rate" not in config, "the paper gives none"
            else:
                rate, steps, epochs, batch, accumulation, gpus, *degrees = LLAMA31[task]
                degrees.append(1)
                assert (config["learning_rate"], config["max_steps"]) == (rate, steps)
                assert config["num_train_epochs"] == epochs
                assert (config["lr_scheduler_type"], config["warmup_ratio"]) == ("linear", 0.03)
                assert (config["adam_beta1"], config["adam_beta2"]) == (0.9, 0.999)
            came = [config.get(sharding, 1), config[tensor], config[pipeline]]
            assert came == degrees
            assert came[0] * came[1] * came[2] == gpus
            assert config["gradient_accumulation_steps"] == accumulation
            assert config["per_device_train_batch_size"] * accumulation * came[0] == batch
            assert 8192 in (config.get("max_length"), config.get("max_seq_len"))
            assert (config["bf16"], config["amp_master_grad"]) == (True, True)
            if framework == "paddlenlp":
                assert config.get("lora", False) == (task == "lora")


def assert_parsed(config, parsed):
    """Every value has arrived, but for what needs other processes."""
    values = {}
    for part in parsed:
        values |= vars(part)
    for key in config.keys() - LOST_ON_ONE_DEVICE:
        came = values[key]
        assert getattr(came, "value", came) == config[key], key


@pytest.mark.parametrize(("model", "task"), configs("paddlenlp"))
def test_paddlenlp_parses_them(model, task):
    pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")
    from paddlenlp.trainer import PdArgumentParser
    from paddlenlp.trl import DataConfig, ModelConfig, SFTConfig

    types = (ModelConfig, DataConfig, SFTConfig)
    config = read("paddlenlp", model, task)
    known = {field.name for type_ in types for field in fields(type_)}
    if task in ("dpo", "rm"):
        assert config.keys() <= known | ALIGNMENT_KEYS
        config = {key: value for key, value in config.items() if key in known}
    assert config.keys() <= known, "PdArgumentParser ignores unknown keys"
    assert_parsed(config, PdArgumentParser(types).parse_dict(config))


@pytest.mark.parametrize(("model", "task"), configs("paddleformers"))
def test_paddleformers_parses_them(model, task):
    pytest.importorskip("paddleformers", reason="needs PaddleFormers: bash scripts/setup_env.sh formers")
    from paddleformers.cli.hparams import get_train_args

    config = read("paddleformers", model, task)
    parsed = get_train_args(dict(config))
    assert_parsed(config, parsed)
    assert parsed[0].lora == (task == "lora")
