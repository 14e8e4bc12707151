"""Commands that read runs and recipes; nothing in the core imports them."""
