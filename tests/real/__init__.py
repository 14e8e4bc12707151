"""Tests on real pretrained weights: `.ci/real`; skipped where they are not installed."""
