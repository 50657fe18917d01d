"""Tests of data_setup/prepare.py and jobs.py."""
