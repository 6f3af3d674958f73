"""Several processes: data parallelism gives the losses of one process; heads can be split between devices.

`python -m paddle.distributed.launch` runs this file as a program, too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")

import paddle
from paddlenlp.trainer import TrainerCallback
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM
from paddlenlp.trl import SFTConfig, SFTTrainer

import paddle_flashmask as fm
from paddle_flashmask.integrations import paddlenlp as integration
from paddle_flashmask.packing import pack, sft_document

VOCAB, LENGTH, LAYERS, STEPS, PROCESSES = 61, 48, 2, 4, 2
ROOT = Path(__file__).parents[2]


class Packed(paddle.io.Dataset):
    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        lengths = rng.integers(2, 12, (40, 2))
        documents = [sft_document(*(rng.integers(1, VOCAB, n) for n in pair)) for pair in lengths]
        self.samples = integration.features(pack(documents, LENGTH))
        assert len(self.samples) >= STEPS * PROCESSES

    def __getitem__(self, index):
        return self.samples[index]

    def __len__(self):
        return len(self.samples)


class OrderedTrainer(SFTTrainer):
    """Takes the samples in order, so that any number of processes takes the same ones in a step."""

    def _get_train_sampler(self):
        return paddle.io.DistributedBatchSampler(self.train_dataset, self.args.per_device_train_batch_size)


class Losses(TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


class Tokenizer:
    padding_side = "right"
    model_max_length = LENGTH


def train(folder, accumulation_steps):
    """STEPS optimizer steps; writes the losses and final weights of this process to `folder`."""
    paddle.seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_flash_attention=True,
        )
    )
    args = SFTConfig(
        output_dir=str(folder / "output"),
        device="cpu",
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation_steps,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    losses = Losses()
    with integration.enable() as switch:
        trainer = OrderedTrainer(
            model=model,
            args=args,
            train_dataset=Packed(),
            data_collator=integration.collate,
            tokenizer=Tokenizer(),
        )
        trainer.add_callback(losses)
        trainer.train()
    rank, processes = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    report = {"losses": losses.losses, "calls": switch.calls, "processes": processes}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    np.savez(folder / f"{rank}.npz", **{name: value.numpy() for name, value in model.state_dict().items()})


def read(folder, rank):
    return json.loads((folder / f"{rank}.json").read_text()), dict(np.load(folder / f"{rank}.npz"))


def test_two_processes_give_the_losses_of_one(tmp_path):
    """Two samples a step: one process takes them after another, two processes at once."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    launch = [sys.executable, "-m", "paddle.distributed.launch", f"--nproc_per_node={PROCESSES}"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*launch, f"--log_dir={tmp_path / 'log'}", __file__, str(two)],
        env=os.environ | {"PADDLE_DISTRI_BACKEND": "gloo", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    logs = [path.read_text(errors="replace")[-3000:] for path in (tmp_path / "log").glob("workerlog.*")]
    assert done.returncode == 0, "\n".join([done.stderr[-3000:], *logs])
    train(one, accumulation_steps=PROCESSES)
    expected, weights = read(one, 0)
    assert expected["processes"] == 1
    assert expected["calls"] == STEPS * PROCESSES * LAYERS
    for rank in range(PROCESSES):
        report, came = read(two, rank)
        assert report["processes"] == PROCESSES
        assert report["calls"] == STEPS * LAYERS
        np.testing.assert_allclose(report["losses"], expected["losses"], rtol=1e-5)
        assert came.keys() == weights.keys()
        for name, value in came.items():
            np.testing.assert_allclose(value, weights[name], rtol=1e-3, atol=1e-5, err_msg=name)
    assert len(set(expected["losses"])) == STEPS


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("mask_heads", [1, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_parallel_shards_of_the_heads_equal_the_whole(degree, mask_heads, dtype):
    """Each device has Hq / degree and Hk / degree heads. A mask of one head is shared, others are split."""
    seqlen, heads_q, heads_k = 96, 8, 4
    rng = np.random.default_rng(degree)
    shapes = [[2, seqlen, heads, 16] for heads in (heads_q, heads_k, heads_k, heads_q)]
    q, k, v, dout = (paddle.to_tensor(rng.standard_normal(s, "float32")).astype(dtype) for s in shapes)
    indices = paddle.to_tensor(rng.integers(0, seqlen + 1, [2, mask_heads, seqlen, 2]).astype("int32"))

    def attend(q, k, v, dout, indices):
        inputs = [x.detach() for x in (q, k, v)]
        for x in inputs:
            x.stop_gradient = False
        out, lse = fm.attention(*inputs, startend_row_indices=indices, causal=True, return_lse=True)
        gradients = paddle.grad(out, inputs, dout)
        return [lse.transpose([0, 2, 1]).numpy(), *(x.astype("float32").numpy() for x in (out, *gradients))]

    whole = attend(q, k, v, dout, indices)
    split = [x.split(degree, axis=2) for x in (q, k, v, dout)]
    masks = [indices] * degree if mask_heads == 1 else indices.split(degree, axis=1)
    shards = [attend(*parts) for parts in zip(*split, masks, strict=True)]
    for name, expected, *parts in zip(("lse", "out", "dq", "dk", "dv"), whole, *shards, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts, axis=2), expected, err_msg=name)


if __name__ == "__main__":
    train(Path(sys.argv[1]), accumulation_steps=1)
    # Everything is written. Of the processes that end by themselves, the first aborts now and then, without a
    # word, after Python is gone: in the destructors of libraries.
    sys.stdout.flush()
    os._exit(0)
