"""Train a small MoE model on text from this machine: `python -m training.train_moe [--model NAME]`.

The default model is the shipped checkpoint. Every few minutes, the program saves the training state and exports the
model, which can then be served. The same command resumes an interrupted training. At the end, the program measures the
model on its held-out text, and writes the report and the model card next to the model.
"""

import argparse
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from training.balance import correction_biases, loss_with_moved_biases, loss_with_penalty
from training.corpus import DOMAINS, load_corpus
from training.export import export, in_bfloat16, untied
from training.loop import CONTEXT, SEQUENCES, Training, batch
from training.models import BUILD, LONGEST, MODELS, SHIPPED, VOCAB, find_folder
from training.report import measure, publish, write_heldout
from training.tokenizer import encode, train_tokenizer

MIX = (*DOMAINS, "arithmetic")  # arithmetic occurs twice, because it needs more training than other text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default=SHIPPED, help="model to train (default: the shipped one)")
    parser.add_argument("--out", type=Path, help="folder of the checkpoint (default: the model's own)")
    parser.add_argument("--state", type=Path, help="training state, to resume from (default: below build/train_moe)")
    parser.add_argument("--steps", type=int, help="steps of 3,840 tokens (default: the model's, 1600 if shipped)")
    seeded = "seed of the weights and the batches; each seed has a folder of its own (default: 0)"
    parser.add_argument("--seed", type=int, default=0, help=seeded)
    options = parser.parse_args()
    recipe, folder = MODELS[options.model], find_folder(options.model)
    own = f"-{options.seed}" if options.seed else ""
    out = options.out or folder.with_name(f"{folder.name}{own}")
    state = options.state or BUILD / "train_moe" / f"{options.model}{own}.pt"
    steps = options.steps or recipe.steps

    corpus = load_corpus()
    texts = {domain: [document.text for document in corpus[domain].train] for domain in DOMAINS}
    tokenizer = train_tokenizer(chain.from_iterable(texts.values()), VOCAB, LONGEST)
    write_heldout(corpus, out)
    streams = {domain: encode(tokenizer, texts[domain]) for domain in DOMAINS}
    print("training tokens:", {domain: len(stream) for domain, stream in streams.items()}, flush=True)
    model = recipe.new_model(options.seed)
    balanced_loss = loss_with_moved_biases if correction_biases(model) else loss_with_penalty

    def loss(draw: torch.Generator) -> Tensor:
        return balanced_loss(model, batch([streams[domain] for domain in MIX], draw))

    for step in Training(model, loss, steps, state, options.seed).run():
        export(in_bfloat16(untied(model)), tokenizer, out)
        print(f"step {step}: exported to {out}", flush=True)
    seen = {"steps": steps, "seed": options.seed, "tokens_trained_on": steps * SEQUENCES * CONTEXT}
    script = Path(__file__).stem + (f" --model {options.model}" if options.model != SHIPPED else "")
    publish(out, seen | measure(out, corpus), recipe.title, script)
    print((out / "README.md").read_text())


if __name__ == "__main__":
    main()
