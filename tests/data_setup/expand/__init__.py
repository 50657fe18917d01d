"""Tests of data_setup/expand.py."""
