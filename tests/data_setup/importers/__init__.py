"""Tests of data_setup/readers/open_record.py and the readers behind it."""
