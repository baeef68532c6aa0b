"""Data, model, losses and recipe of the demo checkpoint. `scripts/train_demo.py` runs them."""
