from utils.cli import run_cli
from utils.report.cli import main

if __name__ == "__main__":
    run_cli(main)
