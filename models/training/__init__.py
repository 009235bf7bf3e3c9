"""Building blocks of the demo model pair: corpus, tokenizer, training, distillation, evaluation."""
