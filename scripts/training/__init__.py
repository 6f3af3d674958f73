"""What scripts/finetune.py, scripts/convergence.py and scripts/training_memory.py are made of.

settings   JSON configurations and their errors
samples    JSONL rows, the text that every machine has, and what becomes of both: documents
tasks      the model, the trainer and the batches of each task
reward     the reward model and its trainer, which PaddleNLP 3.0.0b4 lacks
runs       one training run: metrics of every step, checkpoints, resuming
report     runs beside each other: table, CSV, plot
provenance where numbers come from: command, date, commit, machine, versions
"""
