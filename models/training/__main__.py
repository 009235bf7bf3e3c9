"""Training, export and evaluation of the bundled demo pair: a small draft and a larger target of one family.

`python -m models.training STAGE --corpus DIR` runs one of the stages `tokenizer`, `target`, `draft`, `evaluate`, or
`all` of them in order. `draft` consists of `draft-pretrain`, `draft-texts` (the target writes text) and
`draft-distill`, which can also be run one by one.
Everything in between (token streams, checkpoints, texts) goes to the work directory, so that each stage can be
stopped and started again. Writing `{"steps": N}` to `schedule.json` in the directory of a run changes its length
while it runs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from models.training import tokens
from models.training.architecture import (
    FAST_DTYPE,
    draft_config,
    new_model,
    parameter_count,
    target_config,
    use_training_attention,
)
from models.training.corpus import Split
from models.training.distillation import DistillationSampler, distillation_loss
from models.training.evaluation import evaluate
from models.training.export import export_model, load_model
from models.training.schedule import Schedule, Stage
from models.training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from models.training.training import CHECKPOINT, Rates, Run, load_checkpoint, next_token_loss
from models.training.writing import WritingPlan, write_texts

SEED = 20
# Large batches while the loss falls fast, then smaller ones, because more steps teach more than more rows per step.
# The last third has more structured text, since copying and counting are learned late.
TARGET_STAGES = (
    Stage(0.27, 32, 256),
    Stage(0.64, 16, 256),
    Stage(0.88, 16, 256, (8, 2, 6)),
    Stage(0.96, 8, 512, (4, 1, 3)),
    Stage(1.0, 4, 1024, (2, 1, 1)),
)
TARGET_RATES = Rates(matrix=5e-3, other=4e-3)
PRETRAIN_STAGES = (Stage(1.0, 16, 256, (6, 3, 7)),)
DISTILL_STAGES = (Stage(0.7, 8, 256, (3, 2, 3)), Stage(0.9, 4, 512, (1, 1, 2)), Stage(1.0, 2, 1024, (1, 0, 1)))
DRAFT_RATES = Rates(matrix=5e-3, other=5e-3)
CONTINUED_RATES = Rates(matrix=2e-3, other=2e-3)
EXPORT_DTYPE = torch.bfloat16


def run_tokenizer(options: argparse.Namespace) -> None:
    """Train the tokenizer and write the encoded corpus to the work directory."""
    documents = tokens.load_documents(options.corpus, SEED)
    texts = itertools.chain(documents["prose"].train, documents["code"].train[::2], documents["structured"].train[::4])
    save_tokenizer(train_tokenizer(texts), options.work / "tokenizer")
    write_streams(options, documents)


def run_tokens(options: argparse.Namespace) -> None:
    """Write the encoded corpus for an existing pair, with its own tokenizer."""
    save_tokenizer(load_tokenizer(options.models / "target"), options.work / "tokenizer")
    write_streams(options, tokens.load_documents(options.corpus, SEED))


def write_streams(options: argparse.Namespace, documents: dict[str, Split]) -> None:
    """Encode all documents with the tokenizer of the work directory."""
    tokenizer = load_tokenizer(options.work / "tokenizer")
    for name, size in tokens.write_streams(tokenizer, documents, options.work / "tokens").items():
        print(f"{name}: {size} tokens")


def mixture(directory: Path, seed: int) -> tokens.MixtureSampler:
    """Return a sampler over the three training streams."""
    samplers = [
        tokens.RowSampler(tokens.read_stream(directory, kind, "train"), seed + index)
        for index, kind in enumerate(tokens.KINDS)
    ]
    return tokens.MixtureSampler(samplers)


def run_target(options: argparse.Namespace) -> None:
    """Train the target, resuming from its checkpoint if there is one, and export it."""
    model = new_model(target_config(), SEED)
    print(f"target: {parameter_count(model)} parameters")
    schedule = Schedule(options.target_steps, warm_up=60, decay=0.6, stages=TARGET_STAGES)
    sampler = mixture(options.work / "tokens", SEED)
    Run(model, sampler, schedule, TARGET_RATES, options.work / "target").train(next_token_loss(model))
    export_model(model, load_tokenizer(options.work / "tokenizer"), options.models / "target", EXPORT_DTYPE)


def run_draft_pretrain(options: argparse.Namespace) -> None:
    """Train the draft on the corpus alone; needs no target."""
    model = new_model(draft_config(), SEED)
    print(f"draft: {parameter_count(model)} parameters")
    schedule = Schedule(options.pretrain_steps, warm_up=50, decay=0.2, stages=PRETRAIN_STAGES)
    sampler = mixture(options.work / "tokens", SEED + 100)
    Run(model, sampler, schedule, DRAFT_RATES, options.work / "draft_pretrain").train(next_token_loss(model))


def run_draft_texts(options: argparse.Namespace) -> None:
    """Let the exported target write greedy and sampled text."""
    target = load_model(options.models / "target", FAST_DTYPE)
    documents = tokens.load_documents(options.corpus, SEED)
    plan = WritingPlan(rows=options.written_rows, seed=SEED)
    training = {kind: split.train for kind, split in documents.items()}
    write_texts(target, load_tokenizer(options.work / "tokenizer"), training, plan, options.work / "written.pt")


def run_draft_distill(options: argparse.Namespace) -> None:
    """Distil the exported target into the pre-trained draft and export the draft."""
    target = use_training_attention(load_model(options.models / "target"))
    draft, rates = _undistilled_draft(options)
    written = torch.load(options.work / "written.pt", weights_only=True)
    sampler = DistillationSampler(mixture(options.work / "tokens", SEED + 200), written, SEED)
    schedule = Schedule(options.distill_steps, warm_up=20, decay=0.5, stages=DISTILL_STAGES)
    run = Run(draft, sampler, schedule, rates, options.work / "draft_distill")
    run.train(distillation_loss(draft, target, written.shape[1]))
    export_model(draft, load_tokenizer(options.work / "tokenizer"), options.models / "draft", EXPORT_DTYPE)


def _undistilled_draft(options: argparse.Namespace) -> tuple[LlamaForCausalLM, Rates]:
    """Return the pre-trained draft or, if that is gone, the exported one, to continue its distillation."""
    if not (options.work / "draft_pretrain" / CHECKPOINT).exists():
        return use_training_attention(load_model(options.models / "draft")), CONTINUED_RATES
    draft = new_model(draft_config(), SEED)
    load_checkpoint(draft, options.work / "draft_pretrain")
    return draft, DRAFT_RATES


def run_evaluate(options: argparse.Namespace) -> None:
    """Print the evaluation of the exported pair as a table and as one JSON line."""
    documents = tokens.load_documents(options.corpus, SEED)
    held_out = {kind: split.held_out for kind, split in documents.items()}
    evaluate(options.models, held_out, options.work / "tokens", options.prompts)


STAGES: dict[str, tuple[Callable[[argparse.Namespace], None], ...]] = {
    "tokenizer": (run_tokenizer,),
    "tokens": (run_tokens,),
    "target": (run_target,),
    "draft-pretrain": (run_draft_pretrain,),
    "draft-texts": (run_draft_texts,),
    "draft-distill": (run_draft_distill,),
    "draft": (run_draft_pretrain, run_draft_texts, run_draft_distill),
    "evaluate": (run_evaluate,),
}
STAGES["all"] = tuple(itertools.chain(*(STAGES[name] for name in ("tokenizer", "target", "draft", "evaluate"))))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=sorted(STAGES))
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.txt files with English prose")
    parser.add_argument("--work", type=Path, default=Path("build/demo_models"), help="folder for intermediate files")
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder to export target/ and draft/ to")
    parser.add_argument("--prompts", type=Path, default=Path("prompts"), help="folder of prompt files to evaluate on")
    parser.add_argument("--target-steps", type=int, default=1380, help="steps of 8192, later 4096 tokens")
    parser.add_argument("--pretrain-steps", type=int, default=2600, help="steps of 4096 tokens")
    parser.add_argument("--written-rows", type=int, default=8544, help="texts of 160 tokens the target writes")
    parser.add_argument("--distill-steps", type=int, default=1800, help="steps of about 2048 tokens")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Run the stages named on the command line."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    for stage in STAGES[options.stage]:
        stage(options)


if __name__ == "__main__":
    main()
