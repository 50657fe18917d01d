"""Tests of run_tpu_xla.sh and utils/tpu_worker.sh."""
