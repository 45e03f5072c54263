"""What the layers of the configured GPT or BERT cost by formula: `stage/flops.py` for a
configuration. No torch.
"""
