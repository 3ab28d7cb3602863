"""Course machinery. What scripts/train_pocket.py is made of: facts, corpus, tokenizer, training, evaluation."""
