"""Tests of data_setup/manifest.py, splits.py and the audit of check/."""
