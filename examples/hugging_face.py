"""Hugging Face's Trainer on a corpus that changes: a small GPT-2, and gxd as one callback.

The corpus is made of sentences in which every token is followed by one of four others. Which ones changes with every
phase, so the model has to learn a new language each time; no model can have a loss below log 4 = 1.386. A second
Trainer without the callback is what to compare with. Half a minute does not cost a transformer its plasticity, so
expect both to learn alike: what is shown is how little has to be said, and what is reset.

    python examples/hugging_face.py    # about 30 seconds on one core
"""

import argparse
import tempfile

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

from gxd.integrations.transformers import GxdCallback

TOKENS, LENGTH, BATCH = 64, 16, 16


class ChangingCorpus(IterableDataset):
    """Sentences of one language after the other, `sentences` of each."""

    def __init__(self, phases, sentences):
        self.phases, self.sentences = phases, sentences

    def __iter__(self):
        for phase in range(self.phases):
            chance = torch.Generator().manual_seed(phase)
            followers = torch.randint(TOKENS, (TOKENS, 4), generator=chance)
            text = torch.randint(TOKENS, (self.sentences, 1), generator=chance)
            for _ in range(LENGTH - 1):
                choice = torch.randint(4, (self.sentences,), generator=chance)
                text = torch.cat([text, followers[text[:, -1], choice][:, None]], 1)
            yield from ({"input_ids": sentence, "labels": sentence} for sentence in text)


def model():
    """From a configuration, with random weights: nothing is downloaded. A model of yours takes its place."""
    torch.manual_seed(0)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": LENGTH, "vocab_size": TOKENS}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False))


def train(phases, steps, callbacks, folder):
    """Returns the last log of each phase: the mean loss of its last tenth, and the metrics of gxd."""
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=phases * steps,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        lr_scheduler_type="constant",  # a schedule that ends is for data that end
        logging_steps=max(1, steps // 10),
        save_strategy="no",  # else the state of gxd is in every checkpoint, and resume_from_checkpoint=True goes on
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model(), arguments, train_dataset=ChangingCorpus(phases, steps * BATCH), callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)  # all it would print is in the log_history
    trainer.train()
    logs = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    return [logs[max(step for step in logs if step <= (phase + 1) * steps)] for phase in range(phases)]


def main(argv=None):
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--phases", type=int, default=6)
    options.add_argument("--steps", type=int, default=300, help="of each phase")
    options.add_argument("--rate", type=float, default=1e-4, help="share of the units that is reset per step")
    args = options.parse_args(argv)
    callback = GxdCallback(replacement_rate=args.rate, maturity=100)
    with tempfile.TemporaryDirectory() as folder:
        plain = train(args.phases, args.steps, [], folder)
        reset = train(args.phases, args.steps, [callback], folder)
    print(callback.cbp.plan)
    print("\nloss at the end of each phase\nphase  backprop    gxd   resets so far")
    for phase, (one, other) in enumerate(zip(plain, reset, strict=True)):
        print(f"{phase:5}{one['loss']:10.3f}{other['loss']:7.3f}{other['gxd/resets']:16.0f}")
    return plain, reset, callback.cbp


if __name__ == "__main__":
    main()
