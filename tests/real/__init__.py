"""Tests on real pretrained weights: `.ci/nightly real`; skipped where they are not installed."""
