"""Generate parts of the site from code: reference, recipes, pictures; `docs/conf.py` calls it."""
