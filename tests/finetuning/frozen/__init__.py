"""Tests of finetuning/frozen.py, features/ and head_file.py."""
