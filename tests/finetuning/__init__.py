"""Tests of finetuning/."""
