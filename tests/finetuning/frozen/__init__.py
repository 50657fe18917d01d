"""Tests of finetuning/heads/frozen.py, features/ and head_file.py."""
