from models.weights.words import parse

if __name__ == "__main__":  # torch takes seconds to import
    parse(None)

from models.weights.cli import main
from utils.cli import run_cli

if __name__ == "__main__":
    run_cli(main)
