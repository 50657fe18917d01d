from benchmarks.accelerator.cli import main
from utils.cli import run_cli

if __name__ == "__main__":
    run_cli(main)
