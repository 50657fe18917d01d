"""Tests of run_tpu_xla.sh, utils/tpu_worker.sh and utils/check_paths.py."""
