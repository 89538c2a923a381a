"""Drafters: model, losses, draft vocabulary, export and the parity check."""
