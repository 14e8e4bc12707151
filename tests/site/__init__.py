"""What of the site is made from code: reference, recipes, pictures; `docs/conf.py` asks for it."""
