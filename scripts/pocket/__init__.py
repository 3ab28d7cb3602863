"""Course machinery. The parts of scripts/train_pocket.py: facts, corpus, tokenizer, training, evaluation."""
