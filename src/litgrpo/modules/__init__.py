"""The trainable modules: the only place where the rooms meet."""
