"""Course machinery. What `scripts/train_pocket.py` is made of: the pocket model's facts, corpus, tokenizer and training."""
