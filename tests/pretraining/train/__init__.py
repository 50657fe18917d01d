"""Tests of pretraining/train.py."""
